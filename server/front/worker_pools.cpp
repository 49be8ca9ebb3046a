#include "server/front/worker_pools.h"

#include <cstdio>
#include <utility>

#include "base/log.h"

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
                         const std::string& release, const std::vector<OtherWorker>& others)
    : port_(port), timer_(timer), otherSettings_(current), leaving_(*this) {
  otherSettings_.warm = 0;
  otherSettings_.contexts.clear();
  versions_.push_back({current.rowsHash, release});
  pools_.emplace(currentRows(), kj::heap<WorkerPool>(port, timer, std::move(current)));
  replaceOthers(others);
}

bool WorkerPools::replaceOthers(const std::vector<OtherWorker>& others) {
  std::vector<WorkerVersion> versions = {versions_.front()};
  std::map<uint64_t, kj::Own<WorkerPool>> pools;
  pools.emplace(currentRows(), kj::mv(pools_.at(currentRows())));
  pools_.erase(currentRows());
  bool changed = false;
  for (const OtherWorker& other : others) {
    const uint64_t rows = other.identity.rows;
    if (pools.contains(rows)) continue;
    versions.push_back({rows, other.identity.release});
    const auto had = pools_.find(rows);
    if (had != pools_.end() && had->second->program().isSameFile(other.program)) {
      pools.emplace(rows, kj::mv(had->second));
      pools_.erase(had);
      continue;
    }
    changed = true;
    WorkerPool::Settings settings = otherSettings_;
    settings.program = other.program;
    settings.rowsHash = rows;
    pools.emplace(rows, kj::heap<WorkerPool>(port_, timer_, std::move(settings)));
  }
  changed = changed || !pools_.empty() || versions != versions_;
  for (auto& [rows, pool] : pools_) {
    auto stopped = pool->stop("the worker program of its version was removed from this server, or replaced");
    leaving_.add(stopped.attach(kj::mv(pool)));
  }
  pools_ = std::move(pools);
  versions_ = std::move(versions);
  return changed;
}

kj::Promise<kj::Own<WorkerChild>> WorkerPools::take(uint64_t rows, WorkerPool::Wanted wanted,
                                                    kj::Duration bound) {
  const auto pool = pools_.find(rows);
  if (pool == pools_.end())
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(refuses(rows)));
  return pool->second->take(std::move(wanted), bound);
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
  stopped.add(leaving_.onEmpty());
  return kj::joinPromises(stopped.releaseAsArray());
}

void WorkerPools::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("worker programs: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
