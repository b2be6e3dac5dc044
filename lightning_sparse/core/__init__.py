"""Types that flow through a step, messages, and basics that all rooms share. Imports no other room."""
