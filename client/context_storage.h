#pragma once
// Context-local storage: what cudart keeps per context, under one key for each copy of itself.
//
// Every runtime call starts with a get, so get takes no lock: hashed lists whose nodes are reused but never
// freed. put, remove and takeAll take the storage's mutex. Destructors are the caller's to run, after
// takeAll, holding nothing: they are application code.
//
// Errors as measured on driver 580: put of a key that is there, get and remove of one that is not, are all
// CUDA_ERROR_INVALID_HANDLE.

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace gpupool::client {

using StorageDestructor = void (*)(CUcontext, void* key, void* value);

class ContextStorage {
 public:
  struct Entry {
    void* key;
    void* value;
    StorageDestructor destructor;
    uint64_t order;
  };

  // `open` is read under the mutex: false (the context is going away) refuses with
  // CUDA_ERROR_CONTEXT_IS_DESTROYED, so that nothing can slip in behind takeAll.
  CUresult put(void* key, void* value, StorageDestructor destructor, const std::atomic<bool>& open);
  CUresult get(void** value, void* key) const;
  CUresult remove(void* key);
  // Empties the storage. Newest first, the order in which the driver runs destructors.
  std::vector<Entry> takeAll();

 private:
  struct Node {
    std::atomic<void*> key{nullptr};  // null: free for reuse
    std::atomic<void*> value{nullptr};
    StorageDestructor destructor = nullptr;
    uint64_t order = 0;
    Node* next = nullptr;  // set before the node is published
  };
  static constexpr size_t kBuckets = 16;
  static size_t bucketOf(void* key) {
    const auto bits = reinterpret_cast<uintptr_t>(key);
    return (bits >> 4 ^ bits >> 12) % kBuckets;
  }
  Node* findNode(void* key) const;

  std::array<std::atomic<Node*>, kBuckets> buckets_{};
  std::mutex mutex_;
  uint64_t order_ = 0;
};

}  // namespace gpupool::client
