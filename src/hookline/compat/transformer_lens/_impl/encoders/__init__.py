"""HookedEncoder, HookedEncoderDecoder and BertNextSentencePrediction: BERT and T5 by TransformerLens's names."""
