#include "server/health/watch.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "base/log.h"
#include "server/health/xid.h"

namespace gpupool::health {
namespace {

using Clock = std::chrono::steady_clock;

// NVML's wait for events cannot be ended from outside: it is taken in pieces.
constexpr std::chrono::milliseconds kPiece{100}, kKeenPiece{20};

}  // namespace

struct Watch::Shared {
  std::unique_ptr<Gpus> gpus;
  Settings settings;
  std::mutex lock;
  Report report;
  Clock::time_point taken{};
  Figures figures;
  Clock::time_point figuresTaken;
  std::vector<uint64_t> nvlinks;
  Clock::time_point linksTaken{};  // of the thread alone
  std::atomic<Clock::time_point> wantedUntil{Clock::time_point::min()};
  std::vector<uint32_t> xids;  // of the thread alone

  bool keen() const { return Clock::now() < wantedUntil.load(); }
  void takeFigures();
  void takeLinks();
  void run(const WatchThread::Stop& stop);
  void sampleAll();
  void note(const Event& event);
  void breaks(size_t device, const std::string& why);
};

void Watch::Shared::breaks(size_t device, const std::string& why) {
  std::lock_guard guard(lock);
  if (report.broken[device].empty()) report.broken[device] = why;
}

void Watch::Shared::note(const Event& event) {
  xids[event.device] = static_cast<uint32_t>(event.xid);
  const std::string name = "Xid " + std::to_string(event.xid);
  if (const char* fatal = fatalXid(event.xid))
    breaks(event.device, name + ": " + fatal);
  else
    GPUPOOL_WARNING("GPU %zu of this server reports %s (see dmesg); it goes on", event.device, name.c_str());
}

void Watch::Shared::sampleAll() {
  std::vector<DeviceSample> samples;
  for (size_t device = 0; device < gpus->count(); ++device) {
    bool lost = false;
    samples.push_back(gpus->sample(device, &lost));
    samples.back().xid = xids[device];
    if (lost) breaks(device, "NVML: the GPU is lost");
  }
  std::lock_guard guard(lock);
  report.samples = std::move(samples);
  report.note.clear();
  taken = Clock::now();
}

// figures' facts are written once, by this thread, which alone reads them without the lock.
void Watch::Shared::takeFigures() {
  const bool first = figures.devices.empty();
  if (!first && (!keen() || Clock::now() < figuresTaken + settings.figurePause)) return;
  Figures taken = figures;
  if (first) {
    for (size_t device = 0; device < gpus->count(); ++device) {
      gpus->facts(device, taken.devices.emplace_back(schema::emptyFigures()));
      auto& pairs = taken.between.emplace_back();
      for (size_t other = 0; other < gpus->count(); ++other) pairs.push_back(gpus->between(device, other));
    }
  }
  for (size_t device = 0; device < gpus->count(); ++device) gpus->live(device, taken.devices[device]);
  std::lock_guard guard(lock);
  figures = std::move(taken);
  figuresTaken = Clock::now();
}

// A link has two ends: it is asked about once. Where the driver knows of none, that is known.
void Watch::Shared::takeLinks() {
  const auto now = Clock::now();
  if (linksTaken != Clock::time_point{} && now < linksTaken + settings.linkPeriod) return;
  linksTaken = now;
  constexpr size_t kMost = 64;  // bits; a server has no more (pool-manager/model.h)
  std::vector<uint64_t> links(std::min(gpus->count(), kMost));
  for (size_t one = 0; one < links.size(); ++one)
    for (size_t other = one + 1; other < links.size(); ++other) {
      if (!gpus->joined(one, other)) continue;
      links[one] |= uint64_t{1} << other;
      links[other] |= uint64_t{1} << one;
    }
  std::lock_guard guard(lock);
  nvlinks = std::move(links);
}

void Watch::Shared::run(const WatchThread::Stop& stop) {
  for (;;) {
    sampleAll();
    takeLinks();
    const auto next = Clock::now() + settings.period;
    while (Clock::now() < next) {
      takeFigures();
      const auto piece = std::min(keen() ? kKeenPiece : kPiece, settings.period);
      const auto began = Clock::now();
      for (const Event& event : gpus->events(piece)) note(event);
      // Where there are no events, or one came, this is not over yet.
      const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
      if (stop.within(std::max(piece - passed, std::chrono::milliseconds(0)))) return;
    }
  }
}

Watch::Watch(std::unique_ptr<Gpus> gpus, Settings settings) : shared_(std::make_shared<Shared>()) {
  shared_->report.broken.resize(gpus->count());
  shared_->report.note = "not asked yet";
  shared_->xids.resize(gpus->count());
  shared_->gpus = std::move(gpus);
  shared_->settings = settings;
  thread_ = std::make_unique<WatchThread>([shared = shared_](const WatchThread::Stop& stop) {
    shared->run(stop);
    shared->gpus = nullptr;
  });
}

Watch::Watch(std::string note) : shared_(std::make_shared<Shared>()) {
  shared_->report.note = std::move(note);
}

Watch::~Watch() {
  if (thread_ != nullptr && !thread_->end(shared_->settings.stopBound))
    GPUPOOL_WARNING("NVML does not answer; its thread is abandoned");
}

Report Watch::latest() const {
  std::lock_guard guard(shared_->lock);
  Report report = shared_->report;
  const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - shared_->taken);
  if (!report.samples.empty() && age > shared_->settings.longest) {
    report.samples.clear();
    report.note = "NVML does not answer";
  }
  for (DeviceSample& sample : report.samples) sample.ageMs = static_cast<uint32_t>(age.count());
  return report;
}

void Watch::want() { shared_->wantedUntil = Clock::now() + shared_->settings.wanted; }

Figures Watch::figures() const {
  std::lock_guard guard(shared_->lock);
  Figures figures = shared_->figures;
  figures.age = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - shared_->figuresTaken);
  return figures;
}

std::vector<uint64_t> Watch::nvlinks() const {
  std::lock_guard guard(shared_->lock);
  return shared_->nvlinks;
}

std::optional<std::chrono::milliseconds> Watch::figuresAge() const {
  std::lock_guard guard(shared_->lock);
  if (shared_->figures.devices.empty()) return std::nullopt;
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - shared_->figuresTaken);
}

std::unique_ptr<Watch> watchGpus(const std::string& library, const std::string& driver,
                                 const std::vector<std::string>& uuids, Watch::Settings settings) {
  if (library == "none") return std::make_unique<Watch>("not asked (--nvml none)");
  std::string why;
  auto gpus = loadNvml(library.empty() ? nvmlBeside(driver) : library, uuids, &why);
  if (gpus == nullptr) {
    GPUPOOL_WARNING("no figures of the GPUs: %s", why.c_str());
    return std::make_unique<Watch>("no NVML: " + why);
  }
  return std::make_unique<Watch>(std::move(gpus), settings);
}

}  // namespace gpupool::health
