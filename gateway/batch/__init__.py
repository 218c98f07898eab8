"""Files and batches as OpenAI has them: uploads, validation, feeding, collecting, and the files that come out."""
