#include "transports/ucx_memory.h"

#include <utility>

#include "base/log.h"

namespace gpupool::transport {

Registration::~Registration() {
  if (handle_) owner_->unmap(handle_);
}

std::shared_ptr<Registration> UcxMemory::map(const void* data, size_t bytes, bool withKey) {
  if (abandoned_ || bytes == 0) return nullptr;
  auto* start = static_cast<std::byte*>(const_cast<void*>(data));
  std::shared_ptr<Registration> made(new Registration(shared_from_this(), start, bytes));
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = start;
  params.length = bytes;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  std::lock_guard lock(mutex_);
  if (stopped_) return nullptr;
  ucs_status_t status = ucx_.ucp_mem_map(context_, &params, &made->handle_);
  if (status != UCS_OK) {
    made->handle_ = nullptr;
    if (!std::exchange(complained_, true)) {
      GPUPOOL_WARNING(
          "ucx: %zu bytes cannot be registered for RDMA (%s): they are copied by the processor instead; is "
          "the "
          "limit of locked memory large enough (ulimit -l)?",
          bytes, ucx_.ucs_status_string(status));
    }
    return nullptr;
  }
  handles_.insert(made->handle_);
  void* key = nullptr;
  size_t keyBytes = 0;
  if (withKey && ucx_.ucp_rkey_pack(context_, made->handle_, &key, &keyBytes) == UCS_OK) {
    const auto* packed = static_cast<const std::byte*>(key);
    made->key_.assign(packed, packed + keyBytes);
    ucx_.ucp_rkey_buffer_release(key);
  }
  return made;
}

void UcxMemory::publish(const std::shared_ptr<Registration>& registration) {
  std::lock_guard lock(mutex_);
  published_[registration->data()] = registration;
}

void UcxMemory::withdraw(const Registration& registration) {
  if (abandoned_) return;
  std::lock_guard lock(mutex_);
  auto found = published_.find(registration.data());
  if (found != published_.end() && found->second.lock().get() == &registration) published_.erase(found);
}

std::shared_ptr<Registration> UcxMemory::find(const void* data, size_t bytes) const {
  const auto* start = static_cast<const std::byte*>(data);
  std::lock_guard lock(mutex_);
  auto after = published_.upper_bound(start);
  if (after == published_.begin()) return nullptr;
  auto registration = std::prev(after)->second.lock();
  if (!registration) return nullptr;
  auto offset = static_cast<size_t>(start - registration->data());
  bool inside = offset <= registration->size() && bytes <= registration->size() - offset;
  return inside ? registration : nullptr;
}

void UcxMemory::unmap(ucp_mem_h handle) {
  if (abandoned_) return;
  std::lock_guard lock(mutex_);
  if (handles_.erase(handle) != 0) ucx_.ucp_mem_unmap(context_, handle);
}

void UcxMemory::stop() {
  if (abandoned_) return;
  std::lock_guard lock(mutex_);
  stopped_ = true;
  for (ucp_mem_h handle : handles_) ucx_.ucp_mem_unmap(context_, handle);
  handles_.clear();
  published_.clear();
}

}  // namespace gpupool::transport
