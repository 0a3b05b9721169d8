"""What Lightning has of logged values until it reduces them."""
