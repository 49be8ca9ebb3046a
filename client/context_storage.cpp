#include "client/context_storage.h"

#include <algorithm>
#include <new>

namespace gpupool::client {

ContextStorage::Node* ContextStorage::findNode(void* key) const {
  Node* node = buckets_[bucketOf(key)].load(std::memory_order_acquire);
  while (node != nullptr && node->key.load(std::memory_order_acquire) != key) node = node->next;
  return node;
}

CUresult ContextStorage::put(void* key, void* value, StorageDestructor destructor,
                             const std::atomic<bool>& open) {
  if (key == nullptr) return CUDA_ERROR_INVALID_VALUE;  // marks free nodes
  std::lock_guard lock(mutex_);
  if (!open.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (findNode(key) != nullptr) return CUDA_ERROR_INVALID_HANDLE;
  auto& bucket = buckets_[bucketOf(key)];
  Node* node = bucket.load(std::memory_order_relaxed);
  while (node != nullptr && node->key.load(std::memory_order_relaxed) != nullptr) node = node->next;
  const bool added = node == nullptr;
  if (added) {
    node = new (std::nothrow) Node;
    if (node == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    node->next = bucket.load(std::memory_order_relaxed);
  }
  node->value.store(value, std::memory_order_release);  // get re-reads the key after it
  node->destructor = destructor;
  node->order = ++order_;
  node->key.store(key, std::memory_order_release);
  if (added) bucket.store(node, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult ContextStorage::get(void** value, void* key) const {
  if (key == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Node* node = findNode(key);
  if (node == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  void* found = node->value.load(std::memory_order_acquire);
  // The node may have been removed and reused between the two reads.
  if (node->key.load(std::memory_order_relaxed) != key) return CUDA_ERROR_INVALID_HANDLE;
  *value = found;
  return CUDA_SUCCESS;
}

CUresult ContextStorage::remove(void* key) {
  if (key == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard lock(mutex_);
  Node* node = findNode(key);
  if (node == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  node->key.store(nullptr, std::memory_order_release);
  return CUDA_SUCCESS;
}

std::vector<ContextStorage::Entry> ContextStorage::takeAll() {
  std::vector<Entry> entries;
  {
    std::lock_guard lock(mutex_);
    for (auto& bucket : buckets_) {
      for (Node* node = bucket.load(std::memory_order_relaxed); node != nullptr; node = node->next) {
        void* key = node->key.load(std::memory_order_relaxed);
        if (key == nullptr) continue;
        entries.push_back({key, node->value.load(std::memory_order_relaxed), node->destructor, node->order});
        node->key.store(nullptr, std::memory_order_release);
      }
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.order > b.order; });
  return entries;
}

}  // namespace gpupool::client
