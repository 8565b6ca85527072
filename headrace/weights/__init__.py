"""The weight channel: what trainer and replicas must agree on to move weights."""
