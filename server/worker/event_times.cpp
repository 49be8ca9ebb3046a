#include "server/worker/event_times.h"

#include "schema/wire.h"
#include "server/worker/session.h"

namespace gpupool::server {
namespace {

// Recorded now, and reached: the context is current, and nothing runs in it.
CUresult markNow(const Driver& driver, CUevent& event) {
  CUresult status = driver.cuEventCreate(&event, CU_EVENT_DEFAULT);
  if (status == CUDA_SUCCESS) status = driver.cuEventRecord(event, nullptr);
  return status == CUDA_SUCCESS ? driver.cuEventSynchronize(event) : status;
}

bool keepsTime(const Record::Entry& made) {
  schema::Reader in(made.arguments);
  in.value<uint64_t>();
  return (in.value<uint64_t>() & CU_EVENT_DISABLE_TIMING) == 0 && !in.bad();
}

}  // namespace

std::vector<EventTimes::Time> EventTimes::measure(Session& session) const {
  const Driver& driver = session.driver();
  std::map<uint64_t, CUevent> now;  // by context
  std::vector<Time> times;
  for (const auto& [id, made] : session.record().living(HandleKind::event)) {
    const uint64_t context = made.frame.context;
    CUevent event = nullptr;
    if (!keepsTime(made) || !session.objects().find(id, event) ||
        session.makeCurrentAgain(context) != CUDA_SUCCESS)
      continue;
    if (!now.contains(context) && markNow(driver, now[context]) != CUDA_SUCCESS) continue;
    std::lock_guard lock(mutex_);
    const auto origin = origins_.find(context);
    const CUevent from = origin == origins_.end() ? nullptr : origin->second;
    float here = 0;
    double then = 0;
    if (from == nullptr) {
      if (driver.cuEventElapsedTime_v2(&here, event, now[context]) == CUDA_SUCCESS)
        times.push_back({id, context, here});
    } else if (since(driver, from, context, id, event, then) == CUDA_SUCCESS &&
               driver.cuEventElapsedTime_v2(&here, from, now[context]) == CUDA_SUCCESS) {
      times.push_back({id, context, here - then});
    }
  }
  for (const auto& [context, event] : now)
    if (event != nullptr && session.makeCurrentAgain(context) == CUDA_SUCCESS)
      driver.cuEventDestroy_v2(event);
  return times;
}

CUresult EventTimes::adopt(Session& session, const std::vector<Time>& times, double gapMs) {
  std::lock_guard lock(mutex_);
  for (const Time& time : times) {
    if (!origins_.contains(time.context)) {
      CUevent origin = nullptr;
      CUresult status = session.makeCurrentAgain(time.context);
      if (status == CUDA_SUCCESS) status = markNow(session.driver(), origin);
      if (status != CUDA_SUCCESS) return status;
      origins_[time.context] = origin;
    }
    known_[time.event] = {time.context, time.agoMs + gapMs};
  }
  any_ = !known_.empty();
  return CUDA_SUCCESS;
}

void EventTimes::contextEnded(uint64_t context) {
  std::lock_guard lock(mutex_);
  origins_.erase(context);
  std::erase_if(known_, [&](const auto& entry) { return entry.second.context == context; });
  any_ = !known_.empty();
}

void EventTimes::forgetKnown(uint64_t event) {
  std::lock_guard lock(mutex_);
  known_.erase(event);
  any_ = !known_.empty();
}

CUresult EventTimes::since(const Driver& driver, CUevent origin, uint64_t context, uint64_t id, CUevent event,
                           double& milliseconds) const {
  float here = 0;
  const CUresult status = driver.cuEventElapsedTime_v2(&here, origin, event);
  milliseconds = here;
  if (status != CUDA_ERROR_INVALID_HANDLE) return status;  // it was recorded here, or is about to be
  const auto known = known_.find(id);
  if (known == known_.end() || known->second.context != context) return status;
  milliseconds = -known->second.beforeMs;
  return CUDA_SUCCESS;
}

void EventTimes::elapsed(const Driver& driver, uint64_t startId, CUevent start, uint64_t endId, CUevent end,
                         uint64_t context, float& milliseconds, CUresult& status) const {
  if (!any_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  const auto origin = origins_.find(context);
  if ((!known_.contains(startId) && !known_.contains(endId)) || origin == origins_.end()) return;
  double from = 0, to = 0;
  status = since(driver, origin->second, context, startId, start, from);
  if (status == CUDA_SUCCESS) status = since(driver, origin->second, context, endId, end, to);
  milliseconds = static_cast<float>(to - from);
}

}  // namespace gpupool::server
