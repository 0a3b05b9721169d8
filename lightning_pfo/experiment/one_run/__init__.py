"""The experiment as one run that optimises itself (`plan=auto`): `training` is what happens in it."""
