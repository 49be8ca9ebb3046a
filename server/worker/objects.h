#pragma once
// What a session's handles mean in this process: id -> the driver's handle, and back for handles the driver
// hands out.
//
// Threads: the executor and the threads that serve calls beside it; a mutex inside, held for a look-up only.
// The driver's handles are never sent; the client's ids are never dereferenced.

#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "schema/handles.h"

namespace gpupool::server {

using schema::HandleKind;

class Objects {
 public:
  explicit Objects(std::vector<CUdevice> devices) : devices_(std::move(devices)) {}

  // The driver's handle for `id`. 0 and CUDA's special streams map to themselves. A kernel may stand where a
  // function is expected, as in the driver's own API. False: no such object.
  template <class T>
  bool find(uint64_t id, T& real) {
    constexpr HandleKind kind = schema::handleKind<T>;
    uint64_t raw = 0;
    if (!findRaw(kind, id, raw)) return false;
    real = reinterpret_cast<T>(raw);
    return true;
  }
  // The id the client chose is of the right kind, from the client's half of the index space and free.
  bool mayMint(HandleKind kind, uint64_t id);
  template <class T>
  void mint(uint64_t id, T real) {
    add(id, reinterpret_cast<uint64_t>(real));
  }
  void retire(uint64_t id);
  // The id of a handle the driver returned: the one it was minted with, or a new one named by the worker.
  template <class T>
  uint64_t name(T real) {
    return nameRaw(schema::handleKind<T>, reinterpret_cast<uint64_t>(real));
  }
  // While one exists, this thread's new names are noted in `made`. Where `given` are not used up, they are
  // the new names, in their order: a session that is rebuilt has the names that it had.
  class Naming {
   public:
    explicit Naming(std::vector<uint64_t>& made, std::span<const uint64_t> given = {});
    ~Naming();
    Naming(const Naming&) = delete;
    Naming& operator=(const Naming&) = delete;

   private:
    friend class Objects;
    std::vector<uint64_t>& made_;
    std::span<const uint64_t> given_;
    Naming* outer_;
  };
  // How many handles of each kind were named; and as many are taken for named.
  std::vector<uint32_t> named() const;
  void setNamed(std::span<const uint32_t> counts);

  // The id of a handle the driver returned, or 0: it has none yet.
  template <class T>
  uint64_t known(T real) {
    std::lock_guard lock(mutex_);
    auto found = id_.find(reverseKey(schema::handleKind<T>, reinterpret_cast<uint64_t>(real)));
    return found == id_.end() ? 0 : found->second;
  }
  // The driver is about to destroy `real`: its address may come back as another object.
  template <class T>
  void forget(T real) {
    if (uint64_t id = known(real); id != 0) retire(id);
  }
  // Driver ordinal of the lease's device `ordinal`.
  bool device(uint64_t ordinal, CUdevice& out) const {
    if (ordinal >= devices_.size()) return false;
    out = devices_[ordinal];
    return true;
  }
  const std::vector<CUdevice>& devices() const { return devices_; }
  // Calls f(id, real) for every live object of that kind.
  template <class F>
  void forEach(HandleKind kind, F&& f) {
    std::vector<std::pair<uint64_t, uint64_t>> found;
    {
      std::lock_guard lock(mutex_);
      for (auto [id, real] : real_)
        if (handles::kindOf(id) == kind) found.emplace_back(id, real);
    }
    for (auto [id, real] : found) f(id, real);
  }

 private:
  bool findRaw(HandleKind kind, uint64_t id, uint64_t& real);
  void add(uint64_t id, uint64_t real);
  uint64_t nameRaw(HandleKind kind, uint64_t real);
  static uint64_t reverseKey(HandleKind kind, uint64_t real) {
    return real ^ static_cast<uint64_t>(kind) << 57;  // user addresses end at bit 47
  }

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, uint64_t> real_;  // id -> driver handle
  std::unordered_map<uint64_t, uint64_t> id_;    // reverseKey -> id
  uint32_t nextServerIndex_[handles::kKindCount] = {};
  std::vector<CUdevice> devices_;
};

}  // namespace gpupool::server
