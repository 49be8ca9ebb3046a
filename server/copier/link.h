#pragma once
// A worker's end of its connection to the copier (server/copier/copier.h): takes the bytes of a session's
// device memory aside, and brings them back.
//
// The copier keeps the bytes for this connection: they are gone when the link ends, or its process does. One
// thread; every call waits for the copier, until it has answered, has died, or `stopping` says that the
// session ends (looked at every 50 ms at least). After the latter two the link is of no use: every further
// call fails at once with the same text.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/copier/protocol.h"
#include "server/images/image_cache.h"

namespace gpupool::server {

// One piece of physical memory of a device, from end to end.
struct CopierPiece {
  uint32_t ordinal = 0;  // of the device, by the driver
  uint64_t bytes = 0;    // a multiple of 2 MiB, at most 1 TiB
};

class CopierLink {
 public:
  // A descriptor of piece `index`, as cuMemExportToShareableHandle gives it, for the link to close; or -1: it
  // cannot be exported, which ends the call with an error. At most 128 are open at a time. Pieces are asked
  // for in an order of the link's own, each once in a call.
  using Export = std::function<int(size_t index)>;
  // The copier has read piece `index` and holds no part of it any more: it may be released.
  using Taken = std::function<void(size_t index)>;

  CopierLink(Descriptor socket, std::function<bool()> stopping);

  // Each of the three: "" or why not, for people; then nothing was moved (reserve), or what was not yet taken
  // stays where it is (takeOut), or the pieces' contents are undefined and may be asked for again (bringIn).
  //
  // Room for all pieces together, or none. Once; the others follow it. Waits for memory to be made ready,
  // some tenths of a second a GiB that no session has used before.
  std::string reserve(std::span<const CopierPiece> pieces);
  // Once. After an error some pieces may have been taken, those that `taken` was told of.
  std::string takeOut(const Export& exported, const Taken& taken);
  // Into new memory of the same pieces; asks for those that were taken, and no others. May be repeated. The
  // copier keeps its copy until the link ends. where: the ordinal of the device on which the piece is now;
  // not set: where it was. Memory for it is best made by `exported`: a copier that runs with --verify holds
  // on to what was freed until it is asked for the first time.
  using Where = std::function<uint32_t(size_t index)>;
  std::string bringIn(const Export& exported, const Where& where = nullptr);
  // Copies piece for piece from device to device, and keeps nothing; at any time. from, to: descriptors, as
  // of Export, asked for in ascending order. "" or why not, and then what was to be written is undefined.
  std::string across(std::span<const CopierCrossing> crossings, const Export& from, const Export& to);
  // Another process goes on with this link: it takes a copy of the descriptor over, what was planned, and the
  // number of the last message. One of the two speaks to the copier at a time. When this one is to speak
  // again, it goes on behind the other one's last message, and overhears answers to what that one did not
  // wait for.
  int descriptor() const { return socket_; }
  const std::vector<CopierPiece>& pieces() const { return pieces_; }
  uint32_t sequence() const { return sequence_; }
  void goOn(uint32_t sequence);
  // Every piece was taken out.
  static std::unique_ptr<CopierLink> takeOver(Descriptor socket, std::function<bool()> stopping,
                                              std::vector<CopierPiece> pieces, uint32_t sequence);

  // True: the copier has died, or closed the connection: what it kept is lost. Does not wait.
  bool lost() const;

 private:
  struct Batch {
    uint32_t sequence = 0;
    std::vector<uint32_t> indices;
  };
  std::string broken(std::string why);
  bool waitFor(short events);
  std::string send(CopierVerb verb, uint32_t count, std::span<const std::byte> behind,
                   std::span<const int> descriptors = {});
  // The answer to what was sent last but for what is under way; "" for done.
  std::string answer(uint32_t sequence);
  std::string ask(CopierVerb verb, uint32_t count);
  std::string move(CopierVerb verb, const Export& exported, const std::function<void(size_t)>& moved,
                   const Where& where = nullptr);
  std::string sendBatch(CopierVerb verb, const Export& exported, const Where& where, Batch& batch);
  std::string sendCrossings(std::span<const CopierCrossing> crossings, size_t first, const Export& from,
                            const Export& to);
  // Waits for the oldest batch.
  std::string finish(std::deque<Batch>& underWay, const std::function<void(size_t)>& moved);

  Descriptor socket_;
  std::function<bool()> stopping_;
  std::string broken_;  // why the link is of no use any more
  std::vector<CopierPiece> pieces_;
  std::vector<uint32_t> order_;  // of the pieces: devices take turns, so that each copies while others do
  std::vector<bool> taken_;
  bool reserved_ = false, takeOutBegun_ = false;
  uint32_t sequence_ = 0;
  uint32_t overheard_ = 0;  // answers up to this number are another process's
};

}  // namespace gpupool::server
