#pragma once
// One worker's connection, served: server/copier/protocol.h from the copier's side. The worker may be
// anybody; what it sends is checked here, and nowhere else.
//
// One thread. What the connection keeps is given back when it ends.

#include <array>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/copier/batch.h"
#include "server/copier/devices.h"
#include "server/copier/hoard.h"
#include "server/copier/protocol.h"
#include "server/copier/store.h"
#include "server/images/image_cache.h"

namespace gpupool::server {

class CopierConnection {
 public:
  // verify: --verify of server/copier/copier.h.
  CopierConnection(Descriptor socket, CopierDevices& devices, CopierStore& store, bool verify);
  ~CopierConnection();
  CopierConnection(const CopierConnection&) = delete;
  CopierConnection& operator=(const CopierConnection&) = delete;

  // Until the worker's end closes ("": as it should), or it breaks the rules, or a device does not come back:
  // why, for the log.
  std::string serve();

 private:
  struct Request {
    CopierMessage message;
    std::span<const std::byte> behind;
    std::vector<Descriptor> descriptors;
  };
  enum class State : uint8_t { onDevice, takingOut, kept, bringingIn };
  struct UnderWay {
    CopierBatch* batch = nullptr;
    CopierVerb verb{};
    uint32_t sequence = 0;
  };

  // Each: false when the connection has ended.
  bool wait();
  bool receive();
  bool answer(uint32_t sequence, std::string_view refusal);
  bool lacksDescriptors(const Request& request, bool whole) const;
  bool refuseInTurn(const Request& request, std::string_view why);
  // What a batch names; of one that goes out each piece is where it was planned.
  static std::vector<CopierPlaced> namedIn(const Request& request);
  bool handle(Request& request);
  bool finishOldest();

  bool plan(const Request& request);
  bool reserve(const Request& request);
  bool startBatch(Request& request);
  bool startCrossing(Request& request);
  bool start(const Request& request, CopierBatch::Direction direction,
             std::vector<CopierBatch::Piece> pieces);
  bool beginBringIn(const Request& request);
  bool breach(const char* what);
  void markBatch(const UnderWay& finished, bool moved);

  Descriptor socket_;
  CopierDevices& devices_;
  CopierStore& store_;
  const bool verify_;
  std::string ended_;
  std::vector<std::byte> room_;
  std::vector<CopierPlanned> planned_;
  std::vector<State> states_;  // once there is room
  bool bringsIn_ = false;
  std::unique_ptr<CopierStore::Holding> holding_;
  CopierHoard hoard_;
  std::array<std::unique_ptr<CopierBatch>, kCopierBatches> batches_;
  std::deque<UnderWay> underWay_;
  long pauseNs_ = 0;
};

}  // namespace gpupool::server
