#pragma once
// Watches this server's GPUs from a thread of its own: a sample of each once a second, and critical Xids as
// they come. A driver that is sick answers after seconds or not at all, and the server's loop must not wait
// for it.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/health/gpus.h"
#include "server/watch_thread.h"

namespace gpupool::health {

struct Report {
  std::vector<DeviceSample> samples;  // of each GPU; empty: none was taken lately
  std::vector<std::string> broken;    // of each GPU: not empty: nothing can run on it any more, and why
  std::string note;                   // why there are no samples; for people
};

// What programs ask of the GPUs (schema/nvml_figures.h): taken once at the beginning, for what never changes
// in it, and then only while somebody wants it.
struct Figures {
  std::vector<schema::NvmlFigures> devices;              // empty: NVML has not answered yet, or there is none
  std::vector<std::vector<schema::FigurePair>> between;  // of each GPU, to each
  std::chrono::milliseconds age{0};                      // of what changes
};

class Watch {
 public:
  struct Settings {
    std::chrono::milliseconds period{1000};
    std::chrono::milliseconds longest{10'000};  // an older sample says nothing
    std::chrono::milliseconds stopBound{1000};
    std::chrono::milliseconds wanted{3000};     // after somebody wanted figures, they are taken for so long
    std::chrono::milliseconds figurePause{50};  // between two of them
    // Between two looks at NVLinks: they may be up only when the fabric manager of their switches is.
    std::chrono::milliseconds linkPeriod{60'000};
  };
  Watch(std::unique_ptr<Gpus> gpus, Settings settings);
  // Without a thread: never a sample, and why.
  explicit Watch(std::string note);
  // Waits for the thread, within a bound: one that the driver blocks is abandoned.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Any thread. The samples' ages are those of now.
  Report latest() const;
  // Any thread. From now on, and for Settings::wanted, figures are taken. New ones are there after some 100
  // ms.
  void want();
  bool takesFigures() const { return thread_ != nullptr; }
  Figures figures() const;
  // Any thread. Of each GPU those that NVLink joins it with (fabric::Fabric::nvlinks).
  std::vector<uint64_t> nvlinks() const;
  std::optional<std::chrono::milliseconds> figuresAge()
      const;  // of them, without a copy; none: there are none

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<WatchThread> thread_;
};

// library: empty: that of the driver that was loaded from `driver`; "none": nothing is watched.
std::unique_ptr<Watch> watchGpus(const std::string& library, const std::string& driver,
                                 const std::vector<std::string>& uuids, Watch::Settings settings = {});

}  // namespace gpupool::health
