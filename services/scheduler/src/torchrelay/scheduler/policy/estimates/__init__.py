"""What is learned from measurements, and predicted by it: times, lengths of answers, what is cached."""
