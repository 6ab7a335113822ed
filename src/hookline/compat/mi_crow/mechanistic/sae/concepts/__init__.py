"""What is known about the features of an autoencoder: names, and the texts where they are most active."""
