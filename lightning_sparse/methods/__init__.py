"""The methods of the field: one file each, under the registry of its kind. They never see the network."""
