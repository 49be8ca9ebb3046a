#include "server/worker/objects.h"

#include <algorithm>

namespace gpupool::server {
namespace {

thread_local Objects::Naming* naming = nullptr;

}  // namespace

Objects::Naming::Naming(std::vector<uint64_t>& made, std::span<const uint64_t> given)
    : made_(made), given_(given), outer_(naming) {
  if (given_.empty() && outer_ != nullptr) given_ = outer_->given_;
  naming = this;
}

Objects::Naming::~Naming() {
  if (outer_ != nullptr) {
    outer_->given_ = given_;
    outer_->made_.insert(outer_->made_.end(), made_.begin(), made_.end());
  }
  naming = outer_;
}

std::vector<uint32_t> Objects::named() const {
  std::lock_guard lock(mutex_);
  return {std::begin(nextServerIndex_), std::end(nextServerIndex_)};
}

void Objects::setNamed(std::span<const uint32_t> counts) {
  std::lock_guard lock(mutex_);
  for (size_t kind = 0; kind < counts.size() && kind < handles::kKindCount; ++kind)
    nextServerIndex_[kind] = std::max(nextServerIndex_[kind], counts[kind]);
}

bool Objects::findRaw(HandleKind kind, uint64_t id, uint64_t& real) {
  if (id == 0 || (kind == HandleKind::stream && id <= 2)) {
    real = id;
    return true;
  }
  HandleKind actual = handles::kindOf(id);
  bool fits = actual == kind || (kind == HandleKind::function && actual == HandleKind::kernel);
  if (!fits) return false;
  std::lock_guard lock(mutex_);
  auto found = real_.find(id);
  if (found == real_.end()) return false;
  real = found->second;
  return true;
}

bool Objects::mayMint(HandleKind kind, uint64_t id) {
  if (handles::kindOf(id) != kind || schema::mintedByServer(id)) return false;
  std::lock_guard lock(mutex_);
  // A primary context keeps its name through release and retain.
  return kind == HandleKind::context || real_.find(id) == real_.end();
}

void Objects::add(uint64_t id, uint64_t real) {
  std::lock_guard lock(mutex_);
  real_[id] = real;
  id_[reverseKey(handles::kindOf(id), real)] = id;
}

void Objects::retire(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto found = real_.find(id);
  if (found == real_.end()) return;
  auto reverse = id_.find(reverseKey(handles::kindOf(id), found->second));
  if (reverse != id_.end() && reverse->second == id) id_.erase(reverse);
  real_.erase(found);
}

uint64_t Objects::nameRaw(HandleKind kind, uint64_t real) {
  if (real == 0 || (kind == HandleKind::stream && real <= 2)) return real;
  std::lock_guard lock(mutex_);
  auto found = id_.find(reverseKey(kind, real));
  if (found == id_.end() && kind == HandleKind::function)
    found = id_.find(reverseKey(HandleKind::kernel, real));
  if (found != id_.end()) return found->second;
  uint64_t id = 0;
  if (naming != nullptr && !naming->given_.empty() && handles::kindOf(naming->given_.front()) == kind) {
    id = naming->given_.front();
    naming->given_ = naming->given_.subspan(1);
  } else {
    const uint32_t index = ++nextServerIndex_[static_cast<int>(kind)];
    id = handles::makeHandle(kind, schema::kServerIndexBit | index, 1);
  }
  if (naming != nullptr) naming->made_.push_back(id);
  real_[id] = real;
  id_[reverseKey(kind, real)] = id;
  return id;
}

}  // namespace gpupool::server
