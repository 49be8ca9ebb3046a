#include "server/worker/objects.h"

namespace gpupool::server {

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
  uint32_t index = ++nextServerIndex_[static_cast<int>(kind)];
  uint64_t id = handles::makeHandle(kind, schema::kServerIndexBit | index, 1);
  real_[id] = real;
  id_[reverseKey(kind, real)] = id;
  return id;
}

}  // namespace gpupool::server
