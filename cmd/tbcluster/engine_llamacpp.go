package main

import (
	"context"

	"tbcluster/engine/llamacpp"
)

// installEngine installs llama.cpp for whoever runs this, and returns the path
// of its server; installModel does so with the small model.
func installEngine(ctx context.Context, say func(string)) (string, error) {
	h, err := home()
	if err != nil {
		return "", err
	}
	return llamacpp.Install(ctx, llamacpp.UserDir(h), say)
}

func installModel(ctx context.Context, say func(string)) (string, error) {
	h, err := home()
	if err != nil {
		return "", err
	}
	return llamacpp.InstallModel(ctx, llamacpp.ModelDir(h), say)
}
