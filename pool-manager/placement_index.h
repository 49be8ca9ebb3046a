#pragma once
// What placement asks first, so that it need not look at every device of every server: by server the room
// that is left, and of each kind of device how many there are and the most that is free of one. It only says
// where a wish cannot be served; where it may be, place() looks at the devices.
//
// A kind is what a request can name: model, memory, compute capability. One thread.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pool-manager/placement.h"

namespace gpupool::pool {

class PlacementIndex {
 public:
  // The index of these servers, whatever it was before.
  void rebuild(std::span<const ServerUse> servers);
  // That one has changed, and no other.
  void update(std::span<const ServerUse> servers, size_t server);

  // A wish beside the kinds of this index: which of them its filter lets through, and how much of one has to
  // be free. Valid until the index is changed.
  struct Query {
    uint32_t deviceCount = 1;
    std::vector<uint64_t> least;  // by kind; kNone: not that kind
  };
  static constexpr uint64_t kNone = ~uint64_t{0};
  Query queryOf(const Wish& wish) const;
  // False: the wish cannot be served there now, or, could: whatever becomes free.
  bool mayFit(const Query& query, size_t server) const;
  bool couldFit(const Query& query, size_t server) const;
  // False: what fits there is no set that NVLink joins.
  bool mayJoin(const Query& query, size_t server) const;
  // By room on the whole server, the least first; of equal ones the first server.
  struct Room {
    uint64_t bytes = 0;
    uint32_t server = 0;
    auto operator<=>(const Room&) const = default;
  };
  const std::vector<Room>& byRoom() const { return byRoom_; }

 private:
  struct Amount {
    uint32_t kind = 0, count = 0;
    bool inOrder = false;   // one at least
    uint64_t mostFree = 0;  // of those in order
  };
  struct Summary {
    bool usable = false;
    uint64_t room = 0;
    size_t mostJoined = 0;
    std::vector<Amount> amounts;
  };
  using Kind = std::tuple<std::string, uint64_t, uint32_t, uint32_t>;

  Summary summaryOf(const ServerUse& server);
  uint32_t kindOf(const Device& device);

  std::vector<Summary> summaries_;
  std::vector<Room> byRoom_;
  std::map<Kind, uint32_t> kinds_;
  std::vector<Device> examples_;  // by kind
};

// As place(), without the text of what is missing, and with the index of these servers.
Choice place(const Wish& wish, std::span<const ServerUse> servers, const PlacementIndex& index);
bool couldEver(const Wish& wish, std::span<const ServerUse> servers, const PlacementIndex& index);

}  // namespace gpupool::pool
