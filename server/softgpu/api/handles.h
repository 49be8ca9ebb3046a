#pragma once
// Handles of the driver API. A handle is a minted number, never an address: a stale one is always found out
// (CUDA_ERROR_INVALID_HANDLE), and an application that dereferences one faults. Any thread.

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace gpupool::softgpu::api {

enum class Tag : uint8_t {
  context = 1,
  stream,
  event,
  module,
  library,
  kernel,
  function,
  array,
  mipmap,
  graph,
  node,
  exec,
  pool,
  physical,
  link,
  userObject,
  green,
  resourceDescription,
};

// T has: `using Handle = CUxxx`, `static constexpr Tag kTag`, `Handle handle`.
template <class T>
class HandleTable {
 public:
  using Handle = typename T::Handle;

  Handle add(const std::shared_ptr<T>& object) {
    std::unique_lock lock(mutex_);
    uint64_t number = (uint64_t(T::kTag) << 48) | (next_++ << 4);
    object->handle = toHandle(number);
    objects_.emplace(number, object);
    return object->handle;
  }
  std::shared_ptr<T> find(Handle handle) const {
    std::shared_lock lock(mutex_);
    auto found = objects_.find(toNumber(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  // Removes it; null if it is not (or no longer) there, so exactly one of two racing destroys wins.
  std::shared_ptr<T> take(Handle handle) {
    std::unique_lock lock(mutex_);
    auto found = objects_.find(toNumber(handle));
    if (found == objects_.end()) return nullptr;
    auto object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  template <class Predicate>
  std::vector<std::shared_ptr<T>> takeIf(Predicate predicate) {
    std::unique_lock lock(mutex_);
    std::vector<std::shared_ptr<T>> taken;
    for (auto i = objects_.begin(); i != objects_.end();) {
      if (!predicate(*i->second)) {
        ++i;
        continue;
      }
      taken.push_back(std::move(i->second));
      i = objects_.erase(i);
    }
    return taken;
  }
  template <class Visit>
  void forEach(Visit visit) const {
    std::shared_lock lock(mutex_);
    for (auto& [number, object] : objects_) visit(object);
  }
  static bool owns(const void* handle) {
    return (uint64_t(reinterpret_cast<uintptr_t>(handle)) >> 48) == uint64_t(T::kTag);
  }

 private:
  static Handle toHandle(uint64_t number) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(uintptr_t(number));
    } else {
      return Handle(number);
    }
  }
  static uint64_t toNumber(Handle handle) {
    if constexpr (std::is_pointer_v<Handle>) {
      return uint64_t(reinterpret_cast<uintptr_t>(handle));
    } else {
      return uint64_t(handle);
    }
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> objects_;
  uint64_t next_ = 1;
};

// The table of each kind of object; made once and never destroyed, because applications call from static
// destructors.
template <class T>
HandleTable<T>& table() {
  static auto* const instance = new HandleTable<T>;
  return *instance;
}

}  // namespace gpupool::softgpu::api
