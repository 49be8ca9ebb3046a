#pragma once
// Memory registered with the network card, for one-sided transfers: what UcxMemory registers the card can
// reach, and with a key also the peer.

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "transports/ucx_library.h"

namespace gpupool::transport {

class UcxMemory;

// One range of registered memory, until this goes or the connection ends.
class Registration {
 public:
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  ucp_mem_h handle() const { return handle_; }
  const std::vector<std::byte>& key() const { return key_; }  // for the peer; empty: it gets none

 private:
  friend class UcxMemory;
  Registration(std::shared_ptr<UcxMemory> owner, std::byte* data, size_t size)
      : owner_(std::move(owner)), data_(data), size_(size) {}
  std::shared_ptr<UcxMemory> owner_;
  std::byte* data_;
  size_t size_;
  ucp_mem_h handle_ = nullptr;
  std::vector<std::byte> key_;
};

// All of one connection's. Any thread.
class UcxMemory : public std::enable_shared_from_this<UcxMemory> {
 public:
  UcxMemory(const UcxLibrary& ucx, ucp_context_h context) : ucx_(ucx), context_(context) {}
  // Null if the memory cannot be registered; the reason is logged once. withKey: the peer gets access.
  std::shared_ptr<Registration> map(const void* data, size_t bytes, bool withKey);
  // Makes it what find() returns for addresses in it, until dropped.
  void publish(const std::shared_ptr<Registration>& registration);
  void withdraw(const Registration& registration);
  // The published registration that holds [data, + bytes), or null.
  std::shared_ptr<Registration> find(const void* data, size_t bytes) const;
  // Ends every registration, now and later; before the context goes.
  void stop();
  // In a forked child: the registrations are the parent's.
  void abandon() { abandoned_ = true; }

 private:
  friend class Registration;
  void unmap(ucp_mem_h handle);

  const UcxLibrary& ucx_;
  ucp_context_h context_;
  std::atomic<bool> abandoned_{false};
  // Also guards the context's registrations. Recursive: the last owner of one may release it in here.
  mutable std::recursive_mutex mutex_;
  bool stopped_ = false;
  bool complained_ = false;
  std::set<ucp_mem_h> handles_;
  std::map<const std::byte*, std::weak_ptr<Registration>> published_;
};

}  // namespace gpupool::transport
