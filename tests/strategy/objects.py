"""Objects of users' classes that hold tensors."""


class Own:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Callable(Own):
    def __call__(self):
        return self.x
