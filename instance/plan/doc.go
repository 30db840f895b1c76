// Package plan works out where a model fits, before anything is started.
//
// It reads what a model needs from its own files (Inspect: GGUF and
// safetensors headers, never names or cards), and decides on plain data: nodes,
// links, copies, and what an engine can do. The same input gives the same Plan.
// Every option that was looked at is in it, the rejected ones with the reason
// and the numbers behind it. It starts nothing and asks nobody.
package plan
