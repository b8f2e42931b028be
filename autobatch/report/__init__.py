"""One plan rendered for people. Text today; HTML has its room here."""
