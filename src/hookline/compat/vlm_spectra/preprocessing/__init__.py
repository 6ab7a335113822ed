"""Images and their patches, under vlm-spectra's path."""
