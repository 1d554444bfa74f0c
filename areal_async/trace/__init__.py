"""What a run's log says, for people and for other programs: lists, stories, samples, timelines, and logs to hand on."""
