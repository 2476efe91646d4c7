"""What `appliancectl doctor` looks at. Each check is a function from a Machine to findings; none changes anything."""
