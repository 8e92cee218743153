// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"time"
)

// blobStore keeps blobs as files named by digest, shared by all repositories, and who may see which.
type blobStore struct {
	dir string

	mu      sync.Mutex
	linked  map[string]map[string]bool // repository → digest
	uploads map[string]*upload
	nextID  int
}

// upload is a push under way. One client writes to it, one request at a time.
type upload struct {
	file *os.File
	sum  hash.Hash
	size int64
}

func newBlobStore(dir string) *blobStore {
	return &blobStore{dir: dir, linked: make(map[string]map[string]bool), uploads: make(map[string]*upload)}
}

var validDigest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

func (s *blobStore) path(digest string) string { return filepath.Join(s.dir, "blobs", digest) }

func (s *blobStore) has(repository, digest string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.linked[repository][digest]
}

func (s *blobStore) link(repository, digest string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.linked[repository] == nil {
		s.linked[repository] = make(map[string]bool)
	}
	s.linked[repository][digest] = true
}

func (s *blobStore) unlink(repository, digest string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.linked[repository], digest)
}

// serve answers a request for a blob or an upload, as the OCI distribution specification 1.1 has it.
func (s *blobStore) serve(w http.ResponseWriter, req *http.Request, t Target) {
	switch {
	case t.Kind == KindBlob:
		s.serveBlob(w, req, t)
	case req.Method == http.MethodPost && t.Reference == "":
		s.begin(w, req, t)
	default:
		s.proceed(w, req, t)
	}
}

func (s *blobStore) serveBlob(w http.ResponseWriter, req *http.Request, t Target) {
	if !validDigest.MatchString(t.Reference) {
		refuse(w, http.StatusBadRequest, "DIGEST_INVALID", "not a sha256 digest")
		return
	}
	if !s.has(t.Repository, t.Reference) {
		refuse(w, http.StatusNotFound, "BLOB_UNKNOWN", "no such blob in this repository")
		return
	}
	switch req.Method {
	case http.MethodGet, http.MethodHead:
		file, err := os.Open(s.path(t.Reference))
		if err != nil {
			refuse(w, http.StatusNotFound, "BLOB_UNKNOWN", err.Error())
			return
		}
		defer file.Close()
		w.Header().Set("Docker-Content-Digest", t.Reference)
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(w, req, "", time.Time{}, file)
	case http.MethodDelete:
		s.unlink(t.Repository, t.Reference)
		w.WriteHeader(http.StatusAccepted)
	default:
		refuse(w, http.StatusMethodNotAllowed, "UNSUPPORTED", req.Method)
	}
}

// begin answers the POST that mounts a blob of another repository, or else opens an upload.
func (s *blobStore) begin(w http.ResponseWriter, req *http.Request, t Target) {
	query := req.URL.Query()
	if mount := query.Get("mount"); mount != "" && s.has(query.Get("from"), mount) {
		s.link(t.Repository, mount)
		created(w, t.Repository, mount)
		return
	}
	file, err := os.CreateTemp(filepath.Join(s.dir, "uploads"), "")
	if err != nil {
		refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
		return
	}
	up := &upload{file: file, sum: sha256.New()}
	s.mu.Lock()
	s.nextID++
	id := strconv.Itoa(s.nextID)
	s.uploads[id] = up
	s.mu.Unlock()
	if digest := query.Get("digest"); digest != "" {
		s.finish(w, req, t.Repository, id, up, digest)
		return
	}
	w.Header().Set("Location", uploadPath(t.Repository, id))
	w.Header().Set("Range", "0-0")
	w.WriteHeader(http.StatusAccepted)
}

// proceed answers requests to an open upload.
func (s *blobStore) proceed(w http.ResponseWriter, req *http.Request, t Target) {
	s.mu.Lock()
	up := s.uploads[t.Reference]
	s.mu.Unlock()
	if up == nil {
		refuse(w, http.StatusNotFound, "BLOB_UPLOAD_UNKNOWN", "no such upload")
		return
	}
	switch req.Method {
	case http.MethodPatch:
		if start, _, ok := parseContentRange(req.Header.Get("Content-Range")); ok && start != up.size {
			w.Header().Set("Range", fmt.Sprintf("0-%d", max(up.size-1, 0)))
			refuse(w, http.StatusRequestedRangeNotSatisfiable, "BLOB_UPLOAD_INVALID", "out of order")
			return
		}
		if err := up.append(req.Body); err != nil {
			refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
			return
		}
		w.Header().Set("Location", uploadPath(t.Repository, t.Reference))
		w.Header().Set("Range", fmt.Sprintf("0-%d", max(up.size-1, 0)))
		w.WriteHeader(http.StatusAccepted)
	case http.MethodPut:
		s.finish(w, req, t.Repository, t.Reference, up, req.URL.Query().Get("digest"))
	case http.MethodGet:
		w.Header().Set("Location", uploadPath(t.Repository, t.Reference))
		w.Header().Set("Range", fmt.Sprintf("0-%d", max(up.size-1, 0)))
		w.WriteHeader(http.StatusNoContent)
	case http.MethodDelete:
		s.drop(t.Reference, up)
		w.WriteHeader(http.StatusNoContent)
	default:
		refuse(w, http.StatusMethodNotAllowed, "UNSUPPORTED", req.Method)
	}
}

// finish takes what is left in the body, checks the digest and puts the blob in place.
func (s *blobStore) finish(w http.ResponseWriter, req *http.Request, repository, id string, up *upload, digest string) {
	defer s.drop(id, up)
	if err := up.append(req.Body); err != nil {
		refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
		return
	}
	if got := "sha256:" + hex.EncodeToString(up.sum.Sum(nil)); got != digest {
		refuse(w, http.StatusBadRequest, "DIGEST_INVALID", fmt.Sprintf("content is %s, not %s", got, digest))
		return
	}
	if err := os.Rename(up.file.Name(), s.path(digest)); err != nil {
		refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
		return
	}
	s.link(repository, digest)
	created(w, repository, digest)
}

// drop forgets an upload and removes its file, if that was not moved.
func (s *blobStore) drop(id string, up *upload) {
	s.mu.Lock()
	delete(s.uploads, id)
	s.mu.Unlock()
	_ = up.file.Close()
	if err := os.Remove(up.file.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintln(os.Stderr, "registry:", err)
	}
}

func (u *upload) append(body io.Reader) error {
	n, err := io.Copy(io.MultiWriter(u.file, u.sum), body)
	u.size += n
	return err
}

// parseContentRange reads "0-99", the form that pushes use, with or without a unit before it.
func parseContentRange(header string) (start, end int64, ok bool) {
	if n, err := fmt.Sscanf(header, "%d-%d", &start, &end); err == nil && n == 2 {
		return start, end, true
	}
	n, err := fmt.Sscanf(header, "bytes %d-%d", &start, &end)
	return start, end, err == nil && n == 2
}

func uploadPath(repository, id string) string { return "/v2/" + repository + "/blobs/uploads/" + id }

func created(w http.ResponseWriter, repository, digest string) {
	w.Header().Set("Location", "/v2/"+repository+"/blobs/"+digest)
	w.Header().Set("Docker-Content-Digest", digest)
	w.WriteHeader(http.StatusCreated)
}

// refuse answers with the specification's error body.
func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"errors": []map[string]string{{"code": code, "message": message}}})
}
