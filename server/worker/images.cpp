#include "server/worker/images.h"

#include "schema/wire.h"
#include "server/fatbin/fatbin.h"

namespace gpupool::server {

bool Images::reserve(uint64_t bytes) {
  if (bytes == 0 || bytes > kMostBytes - heldBytes_) return false;
  heldBytes_ += bytes;
  return true;
}

bool Images::offer(const schema::ImageName& name) {
  const ImageKey wanted = key(name);
  {
    std::lock_guard lock(mutex_);
    auto found = held_.find(wanted);
    if (found == held_.end() && held_.size() >= kMostNames) return false;
    Held& held = held_[wanted];
    ++held.owed;
    if (held.image != nullptr) return true;
    if (held.writer != nullptr) return false;
  }
  auto image = cache_.open(wanted);
  if (image == nullptr) return false;
  std::lock_guard lock(mutex_);
  auto found = held_.find(wanted);
  if (found == held_.end()) return false;  // another thread's load took it and failed
  if (found->second.image != nullptr) return true;
  if (found->second.writer != nullptr || !reserve(name.bytes)) return false;
  found->second.image = std::move(image);
  return true;
}

CUresult Images::append(const schema::ImageName& name, size_t offset, std::span<const std::byte> data) {
  // Of code that is here; where it is not, its load says so.
  if (data.empty() && name.bytes != 0) return CUDA_SUCCESS;
  std::lock_guard lock(mutex_);
  auto found = held_.find(key(name));
  if (found == held_.end()) {
    if (held_.size() >= kMostNames) return CUDA_ERROR_OUT_OF_MEMORY;
    found = held_.try_emplace(key(name)).first;
  }
  Held& held = found->second;
  if (held.image != nullptr) return CUDA_SUCCESS;
  if (held.writer == nullptr) {  // counts whole from its first piece
    if (!reserve(name.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    held.writer = offset == 0 && data.size() <= name.bytes ? cache_.write(found->first) : nullptr;
    if (held.writer == nullptr) {
      heldBytes_ -= name.bytes;
      return offset == 0 && data.size() <= name.bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    }
  }
  ImageWriter& writer = *held.writer;
  // Two threads of the client may send one image, their pieces interleaved: what is here already is passed
  // over.
  if (offset < writer.written() && data.size() <= writer.written() - offset) return CUDA_SUCCESS;
  if (offset != writer.written() || data.size() > name.bytes - writer.written())
    return CUDA_ERROR_INVALID_VALUE;
  const bool stored = writer.append(data);
  if (stored && writer.written() < name.bytes) return CUDA_SUCCESS;
  if (stored) held.image = writer.finish();
  held.writer.reset();
  if (held.image != nullptr) return CUDA_SUCCESS;
  heldBytes_ -= name.bytes;
  return stored ? CUDA_ERROR_INVALID_IMAGE : CUDA_ERROR_OUT_OF_MEMORY;
}

std::shared_ptr<Image> Images::take(const schema::ImageName& name) {
  std::lock_guard lock(mutex_);
  auto found = held_.find(key(name));
  if (found == held_.end() || found->second.image == nullptr) return nullptr;
  Held& held = found->second;
  if (held.owed > 1) {
    --held.owed;
    return held.image;
  }
  auto image = std::move(held.image);
  held_.erase(found);
  heldBytes_ -= name.bytes;
  return image;
}

std::shared_ptr<Image> Images::find(const schema::ImageName& name) {
  {
    std::lock_guard lock(mutex_);
    const auto found = held_.find(key(name));
    if (found != held_.end() && found->second.image != nullptr) return found->second.image;
  }
  return cache_.open(key(name));
}

std::vector<Images::Pending> Images::pending() {
  std::lock_guard lock(mutex_);
  std::vector<Pending> all;
  for (const auto& [wanted, held] : held_) {
    Pending& one = all.emplace_back();
    std::memcpy(one.name.words, wanted.digest.data(), sizeof one.name.words);
    one.name.bytes = wanted.bytes;
    one.loads = held.owed;
    one.here = held.image != nullptr;
    one.arriving = held.writer != nullptr;
  }
  return all;
}

void Images::keep(uint64_t owner, std::shared_ptr<const void> code) {
  std::lock_guard lock(mutex_);
  kept_[owner] = std::move(code);
}

void Images::release(uint64_t owner) {
  std::shared_ptr<const void> code;  // ends outside the lock
  std::lock_guard lock(mutex_);
  auto found = kept_.find(owner);
  if (found == kept_.end()) return;
  code = std::move(found->second);
  kept_.erase(found);
}

bool Images::readLinked(std::span<const std::byte> bytes, std::vector<std::span<const std::byte>>& parts) {
  schema::Reader in(bytes);
  const uint64_t count = in.value<uint64_t>();
  if (count == 0 || count > kMostParts) return false;
  for (uint64_t i = 0; i < count; ++i) {
    parts.push_back(in.blob());
    if (in.bad() || !fatbin::fits(parts.back())) return false;
  }
  return true;
}

const Images::Contents* Images::contents(const schema::ImageName& name, unsigned kind,
                                         unsigned architecture) {
  const ImageKey wanted = key(name);
  {
    std::lock_guard lock(mutex_);
    if (const auto known = contents_.find(wanted); known != contents_.end()) return &known->second;
  }
  const std::shared_ptr<Image> image = cache_.open(wanted);
  if (image == nullptr) return nullptr;
  Contents found;
  std::vector<std::span<const std::byte>> parts;
  if (kind == 2 ? !readLinked(image->bytes(), parts) ||
                      !fatbin::readLinkedSymbols(parts, architecture, found.variables)
                : !fatbin::readSymbols(image->bytes(), architecture, found.variables))
    return nullptr;
  found.mayAllocate = kind == 2 ? fatbin::linkedMayAllocate(parts, architecture)
                                : fatbin::mayAllocate(image->bytes(), architecture);
  image->settle();
  std::lock_guard lock(mutex_);
  return &contents_.emplace(wanted, std::move(found)).first->second;
}

}  // namespace gpupool::server
