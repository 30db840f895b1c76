// Package e2e tests the whole program as people use it: real agents in a
// virtual cluster, real cables of its kind, a real engine with a real model. It
// runs once as root and once as an ordinary user.
package e2e
