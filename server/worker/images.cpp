#include "server/worker/images.h"

#include <cstring>

#include "base/hmac.h"

namespace gpupool::server {

bool Images::have(const schema::ImageName& name) {
  std::lock_guard lock(mutex_);
  return whole_.count(key(name)) != 0;
}

CUresult Images::append(const schema::ImageName& name, size_t offset, std::span<const std::byte> data) {
  std::lock_guard lock(mutex_);
  if (whole_.count(key(name)) != 0) return CUDA_SUCCESS;
  auto started = partial_.find(key(name));
  if (started == partial_.end()) {  // counts whole from its first piece: unfinished images are memory too
    if (name.bytes == 0 || name.bytes > kMostBytes - held_) return CUDA_ERROR_OUT_OF_MEMORY;
    if (offset != 0 || data.size() > name.bytes) return CUDA_ERROR_INVALID_VALUE;
    held_ += name.bytes;
    started = partial_.try_emplace(key(name)).first;
  }
  std::vector<std::byte>& bytes = started->second;
  // Two threads of the client may send one image, their pieces interleaved: what is here already is passed
  // over.
  if (offset < bytes.size() && data.size() <= bytes.size() - offset) return CUDA_SUCCESS;
  if (offset != bytes.size() || data.size() > name.bytes - bytes.size()) return CUDA_ERROR_INVALID_VALUE;
  bytes.insert(bytes.end(), data.begin(), data.end());
  if (bytes.size() < name.bytes) return CUDA_SUCCESS;
  auto digest = sha256(bytes);
  bool same = std::memcmp(digest.data(), name.words, sizeof name.words) == 0;
  if (same)
    whole_[key(name)] = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  else
    held_ -= name.bytes;
  partial_.erase(started);
  return same ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

Images::Bytes Images::find(const schema::ImageName& name) {
  std::lock_guard lock(mutex_);
  auto found = whole_.find(key(name));
  return found == whole_.end() ? nullptr : found->second;
}

}  // namespace gpupool::server
