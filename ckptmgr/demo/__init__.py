"""The main job as a story: train, be killed in the middle of an upload, resume, and equal the uninterrupted run to the last bit."""
