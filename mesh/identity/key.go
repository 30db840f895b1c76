package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"tbcluster/api/fault"
)

// KeyFile is the name of the key file in the agent's state directory.
const KeyFile = "key.pem"

const keyBlock = "PRIVATE KEY" // PKCS #8

// maxKeyFile bounds what is read as a key file, bytes.
const maxKeyFile = 16 << 10

// Key is a node's private key with what follows from it.
type Key struct {
	private ed25519.PrivateKey
	id      NodeID
	cert    tls.Certificate
}

// OpenKey returns the key in dir, and makes one (mode 0600) if there is none.
// created says that it did. A file that is there but cannot be used is an error
// (FILE_IO), never replaced: a new key would be another node.
func OpenKey(dir string) (key *Key, created bool, err error) {
	path := filepath.Join(dir, KeyFile)
	key, err = readKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, false, err
	}
	key, err = NewKey()
	if err != nil {
		return nil, false, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key.private)
	if err != nil {
		return nil, false, keyFault(path, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, false, keyFault(path, err)
	}
	err = createFile(path, pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: der}))
	if errors.Is(err, fs.ErrExist) {
		// Somebody made one at the same moment: theirs counts.
		key, err = readKey(path)
		return key, false, err
	}
	if err != nil {
		return nil, false, keyFault(path, err)
	}
	return key, true, nil
}

// NewKey returns a fresh key that is in no file.
func NewKey() (*Key, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return newKey(private)
}

// KeyFrom returns a Key of a private key that is in no file of ours.
func KeyFrom(private ed25519.PrivateKey) (*Key, error) {
	if len(private) != ed25519.PrivateKeySize {
		return nil, fmt.Errorf("a private key of %d bytes", len(private))
	}
	return newKey(private)
}

// Renew moves keys and trust in dir aside (to names that end in ".old" and the
// time) and returns a new key: another node, in no cluster.
func Renew(dir string, now time.Time) (*Key, error) {
	stamp := now.UTC().Format("20060102T150405.000000000")
	for _, name := range []string{TrustFile, APIFile, KeyFile} {
		path := filepath.Join(dir, name)
		err := os.Rename(path, path+".old-"+stamp)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, keyFault(path, err)
		}
	}
	key, _, err := OpenKey(dir)
	return key, err
}

func readKey(path string) (*Key, error) {
	data, err := readSmall(path, maxKeyFile)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		return nil, keyFault(path, err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, keyFault(path, err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		f := keyFault(path, fmt.Errorf("others may read it (mode %04o)", info.Mode().Perm()))
		f.Fix = "chmod 600 " + path + ", or take a new identity with `tbcluster pair --new-identity` if somebody has read it"
		return nil, f
	}
	key, err := parseKey(data)
	if err != nil {
		return nil, keyFault(path, err)
	}
	return key, nil
}

func parseKey(data []byte) (*Key, error) {
	block, rest := pem.Decode(data)
	if block == nil || block.Type != keyBlock || len(rest) != 0 {
		return nil, errors.New("it does not hold one PEM block with a private key")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	private, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("it holds a %T, not an Ed25519 key", parsed)
	}
	return newKey(private)
}

func newKey(private ed25519.PrivateKey) (*Key, error) {
	pub := private.Public().(ed25519.PublicKey)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		// The same for all: nothing here is to be believed but the key.
		Subject:   pkix.Name{CommonName: "tbcluster"},
		NotBefore: time.Unix(0, 0),
		NotAfter:  time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:  x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, pub, private)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return &Key{
		private: private,
		id:      IDOf(pub),
		cert:    tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private},
	}, nil
}

// ID returns the node ID of the key.
func (k *Key) ID() NodeID { return k.id }

// Public returns the public key.
func (k *Key) Public() ed25519.PublicKey { return k.private.Public().(ed25519.PublicKey) }

// Certificate returns the self-made certificate for TLS.
func (k *Key) Certificate() tls.Certificate { return k.cert }

func (k *Key) sign(message []byte) []byte { return ed25519.Sign(k.private, message) }

func keyFault(path string, err error) *fault.Fault {
	return fault.New(fault.FileIO, "use the key of this node", err,
		"restore the file from a backup; without one, `tbcluster pair --new-identity` makes this machine a new node that must pair again").At(path)
}
