#include "client/transfers.h"

#include <chrono>

namespace gpupool::client {
namespace {

thread_local unsigned insideDepth __attribute__((tls_model("initial-exec"))) = 0;
thread_local Transfers::Inside* outermost __attribute__((tls_model("initial-exec"))) = nullptr;
constexpr std::chrono::milliseconds kGateLook{100};  // for what ends a wait and wakes nobody

}  // namespace

Transfers::Inside::Inside(Transfers& transfers, Kind kind) : transfers_(&transfers), kind_(kind) {
  if (insideDepth++ == 0) {
    transfers.enter(kind);
    outermost = this;
  } else {
    transfers_ = nullptr;
  }
}

Transfers::Inside::~Inside() {
  --insideDepth;
  if (transfers_ == nullptr) return;
  outermost = nullptr;
  transfers_->leave(kind_);
}

bool Transfers::isInside() { return insideDepth != 0; }

Transfers::Exempt::Exempt() { ++insideDepth; }
Transfers::Exempt::~Exempt() { --insideDepth; }

Transfers::Outside::Outside(Transfers& transfers) : left_(outermost) {
  if (left_ != nullptr) transfers.leave(left_->kind_);
}

Transfers::Outside::~Outside() {
  if (left_ != nullptr) left_->transfers_->enter(left_->kind_);
}

// Each side changes its own and then looks at the other's: one of the two sees the other.
void Transfers::enter(Kind kind) {
  inside_[kind].fetch_add(1);
  while (__builtin_expect(closed_[kind].load(), 0)) {
    leave(kind);
    {
      std::unique_lock lock(mutex_);
      while (closed_[kind]) changed_.wait_for(lock, kGateLook);
    }
    inside_[kind].fetch_add(1);
  }
}

void Transfers::leave(Kind kind) {
  if (inside_[kind].fetch_sub(1) != 1 || !closed_[kind].load()) return;
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

Transfers::Closed::Closed(Transfers& transfers, Kind kind, const std::function<bool()>& cancelled)
    : transfers_(transfers), kind_(kind), empty_(false) {
  transfers.closed_[kind] = true;
  std::unique_lock lock(transfers.mutex_);
  while (!(empty_ = transfers.inside_[kind].load() == 0) && !cancelled())
    transfers.changed_.wait_for(lock, kGateLook);
}

Transfers::Closed::~Closed() {
  std::lock_guard lock(transfers_.mutex_);
  transfers_.closed_[kind_] = false;
  transfers_.changed_.notify_all();
}

}  // namespace gpupool::client
