#include "server/front/worker_pools.h"

#include <cstdio>

namespace gpupool::server {
namespace {

// "3b1f... of gpupool 0.1.0"
std::string named(uint64_t rows, const std::string& release) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(rows));
  return release.empty() ? text : std::string(text) + " of gpupool " + release;
}

}  // namespace

WorkerPools::WorkerPools(kj::UnixEventPort& port, kj::Timer& timer, WorkerPool::Settings current,
                         const std::string& release, const std::vector<OtherWorker>& others) {
  versions_.push_back({current.rowsHash, release});
  for (const OtherWorker& other : others) {
    if (other.identity.rows == current.rowsHash) continue;
    versions_.push_back({other.identity.rows, other.identity.release});
    WorkerPool::Settings settings = current;
    settings.program = other.program;
    settings.rowsHash = other.identity.rows;
    settings.warm = 0;
    settings.contexts.clear();
    pools_.emplace(other.identity.rows, kj::heap<WorkerPool>(port, timer, std::move(settings)));
  }
  pools_.emplace(currentRows(), kj::heap<WorkerPool>(port, timer, std::move(current)));
}

kj::Promise<kj::Own<WorkerChild>> WorkerPools::take(uint64_t rows, std::vector<int> ordinals,
                                                    kj::Duration bound) {
  const auto pool = pools_.find(rows);
  if (pool == pools_.end())
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(refuses(rows)));
  return pool->second->take(std::move(ordinals), bound);
}

std::string WorkerPools::refuses(uint64_t rows, const std::string& release) const {
  constexpr size_t kMostNamed = 4;  // a refusal has little room
  if (pools_.contains(rows)) return "";
  std::string ours;
  for (size_t i = 0; i < versions_.size() && i < kMostNamed; ++i)
    ours += (ours.empty() ? "" : ", ") + named(versions_[i].rows, versions_[i].release);
  return "version mismatch: call rows " + named(rows, release) + " here, " + ours +
         " on the server; install one of the server's versions here, or the other worker program there "
         "(--workers)";
}

std::string WorkerPools::describe(uint64_t rows) const { return "call rows " + named(rows, releaseOf(rows)); }

std::string WorkerPools::releaseOf(uint64_t rows) const {
  for (const WorkerVersion& version : versions_)
    if (version.rows == rows) return version.release;
  return "";
}

kj::Promise<void> WorkerPools::stop() {
  kj::Vector<kj::Promise<void>> stopped;
  for (auto& [rows, pool] : pools_) stopped.add(pool->stop());
  return kj::joinPromises(stopped.releaseAsArray());
}

}  // namespace gpupool::server
