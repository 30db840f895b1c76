// Package catalogue finds the models of one person on one node by itself: in
// the Hugging Face cache, Exo's, LM Studio's and llama.cpp's directories, our
// own, ~/models, and the directories named in the configuration.
//
// A model is a GGUF file (split ones count as one) or a directory with a
// safetensors index. The walk is bounded and follows no link twice. Digests are
// computed only when asked for and remembered by path, size, time and inode.
//
// ServeWorker runs in `tbcluster worker`, with the identity of the person whose
// files they are; Client is its other side, in the agent. Resolve turns what
// people write into one model or an error that lists what fits.
package catalogue
