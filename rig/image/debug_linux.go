package image

import (
	"context"

	"tbcluster/api/fault"
)

func (s *Store) debugKernel(ctx context.Context, t *Tools) (kernelTree, error) {
	return kernelTree{}, fault.Newf(fault.Unsupported, "", "debug kernel")
}
