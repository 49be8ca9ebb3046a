#pragma once
// Host memory that devices address. Pinned and managed memory lies in an arena that client and worker have at
// one address: on one host the same pages (a memfd), on a network a copy on each side.
//
//  * Copies on a network: `upload` puts pinned bytes into the worker's copy before a host-to-device copy.
//    `download` has the worker put the result of a device-to-host copy into ours before it reports the copy
//    as done.
//  * Mirrors synchronise two copies where kernels address memory that cannot be shared: mapped and managed
//    memory on a network, registered memory and managed symbols everywhere. The client's changes are sent
//    before a launch or a copy (`publish`), the worker's come back at a synchronisation (`settle`).
//    schema/mirror.h has the rules.
//
// Changes travel aside (schema/frame.h), so they are there before any frame sent after them.
//
// Threads: any. A host function's thread comes here too, while the worker's frames may wait for that
// function: of the locks it takes (resending_, mirrorMutex_, mutex_; in this order) none is held across a
// frame's wait.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "client/memory/page_heat.h"
#include "client/streams.h"
#include "schema/hello.h"
#include "schema/mirror.h"
#include "transports/transport.h"

namespace gpupool::client {

class HostMemory {
 public:
  // What arena memory is used for. copies: only copies so far; mirrorBlock() is called when kernels turn out
  // to address it. mirrored: kernels will address it. target: the device's copy of the application's own
  // memory; the caller adds the mirror.
  enum class Use { copies, mirrored, target };
  // Bytes of the arena at an address both sides have.
  CUresult allocate(CUcontext context, size_t bytes, unsigned flags, Use use, uint64_t& address);
  // One host: arena memory of the pages of a file, which keep their contents (SharedMemory::ofFile). Takes
  // the descriptor.
  CUresult shareFile(CUcontext context, int descriptor, uint64_t offset, size_t bytes, uint64_t& address);
  CUresult release(CUcontext context, uint64_t address);
  // The context is about to end, and the worker's registrations with it: what is kept for its next allocation
  // goes.
  void contextEnds(CUcontext context);
  // True if [address, + bytes) is arena memory.
  bool holds(uint64_t address, size_t bytes) const;

  // Network: for a copy that is to be posted in `stream` next: first awaitUpload, which may wait for the
  // device, and then, inside Transfers::named until the copy is sent, upload.
  CUresult awaitUpload(const void* from, size_t bytes);
  CUresult upload(const Stream& stream, const void* from, size_t bytes);
  // While host functions are under way on a network, uploads are noted: a function may change bytes that a
  // copy behind it was to take, so they are sent again before its stream goes on.
  // Begins: its number.
  uint64_t hostFunctionBegins(const Stream& stream);
  void hostFunctionEnded(uint64_t function);
  static constexpr size_t kTravel = size_t{4} << 20;  // a large copy goes in pieces of this
  // Network: posts the copy of device memory at `from` to the arena at `to`.
  CUresult download(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes);

  // Mirrors the application's memory at `host` to `device`: arena memory reserved for this, or a symbol's
  // address. What the device's side holds at first: what the application's does (zeros), or anything.
  enum class Begins : uint8_t { alike, unknown };
  void addMirror(uint64_t host, uint64_t device, size_t bytes, Begins begins = Begins::alike);
  void removeMirror(uint64_t host, uint64_t device = 0);  // device 0: whichever it is
  // A managed symbol lies in the worker at `address`: this process gets memory of its own there, and a
  // mirror.
  CUresult adoptManagedSymbol(uint64_t address, size_t bytes);
  // The library of that symbol, if it is one, is about to be unloaded, and the worker's copy goes with it.
  void dropManagedSymbol(uint64_t address, size_t bytes);
  // One host: kernels address arena memory at `address`. It is mirrored when the session goes to another
  // host. False: it is there already.
  bool noteAddressed(uint64_t address);
  // False: there is no arena memory at `address` that kernels may turn out to address (mirrorArena,
  // registered.h).
  bool mirrorable(uint64_t address, uint64_t& start, size_t& bytes) const;
  // Of such: from now on kernels address it.
  void mirrorBlock(uint64_t start, size_t bytes);
  // Where kernels address [address, + bytes), the application's address or the device's, if it is mirrored.
  // What they wrote there is newer than the application's side until settle(); after publish(), whatever
  // comes next in a stream may read it there.
  bool mirrored(uint64_t address, size_t bytes, uint64_t& device) const;
  bool mirroring() const { return mirrorCount_.load(std::memory_order_relaxed) != 0; }
  CUresult publish();
  // Network: puts the bytes at `from` into the worker's arena memory at `to`. landed: waits until they are
  // there; otherwise `from` stays as it is until then. And the way back, which waits.
  CUresult put(const void* from, uint64_t to, size_t bytes, bool landed = false);
  CUresult get(void* to, uint64_t from, size_t bytes);
  // A move (Session::MoveHooks): regions() is the number of pieces, of which the new worker names each.
  size_t regions() const;
  // lends: that one is to have our pages. What only the old one has comes here first.
  bool prepareMove(transport::Connection& next, std::span<const schema::MovedRegion> regions, bool lends,
                   std::string& why);
  void moved();
  // Behind prepareMove: the bytes that the new worker has at `address` of the arena, to the same address
  // here. False: it does not give them.
  bool fetchNext(transport::Connection& next, uint64_t address, size_t bytes) const;
  // The session has gone to another host: what kernels address is brought there as it is now.
  void bring();
  // While everything stands still, ahead of a move: what kernels have written is brought here.
  CUresult settleAll();
  // The old worker has died (Session::MoveHooks).
  bool lend(transport::Connection& next, std::string& why);
  bool lentAtNext(uint64_t address, transport::Region& region, uint64_t& offset) const;
  bool arrive(const std::map<uint64_t, transport::Region>& pinned, std::string& why);
  CUresult settle() { return mirroring() ? settleSlow() : CUDA_SUCCESS; }
  // Of work that was sent before that word, which has come.
  CUresult settle(WordMark behind) { return mirroring() ? settleBehind(behind) : CUDA_SUCCESS; }

 private:
  static constexpr size_t kSharedPiece = size_t{2} << 20;
  struct Piece {  // one mapping of the arena, cut into allocations of one context
    CUcontext context = nullptr;
    size_t bytes = 0;
    transport::Region region;  // the worker's; this and the next change with a move
    transport::Region lent;    // network: ours, which the worker puts into; or a file's pages
    std::shared_ptr<transport::SharedMemory> memory;
    unsigned flags = 0;
    size_t used = 0;
    std::map<uint64_t, size_t> free;
  };
  struct Arrival {  // of a piece at the new worker
    transport::Region region, lent;
  };
  struct Parked {  // released, and held by the transport perhaps
    uint64_t address = 0;
    size_t bytes = 0;
    std::shared_ptr<transport::SharedMemory> memory;
  };
  struct Mirror {
    uint64_t host = 0, device = 0;
    size_t bytes = 0;
    schema::MirrorBase base;
    PageHeat heat;
  };
  struct Landing {  // bytes under way to us, until the word has that value
    uint64_t word = 0, value = 0;
    uint64_t to = 0;
    size_t bytes = 0;
  };
  using PieceAt = std::map<uint64_t, Piece>::iterator;
  bool takeAddress(size_t bytes, uint64_t& address);
  CUresult addPiece(CUcontext context, size_t bytes, unsigned flags, PieceAt& made);
  PieceAt pieceWithRoom(CUcontext context, size_t bytes, uint64_t& address);
  CUresult unmap(std::unique_lock<std::mutex>& growing, std::optional<Transfers::Inside>& inside,
                 CUcontext context, uint64_t start, Piece gone);
  // Gives a block back to its piece. True: the piece is free now and not kept.
  bool freeBlock(PieceAt piece, uint64_t address, size_t bytes);
  std::map<uint64_t, Piece>::const_iterator pieceOf(uint64_t address) const;
  std::map<uint64_t, size_t>::const_iterator blockOf(uint64_t address) const;
  bool unmapParked();
  CUresult settleSlow();
  CUresult settleBehind(WordMark mark);
  CUresult awaitLandings(uint64_t address, size_t bytes);
  CUresult collect(std::span<Mirror* const> mirrors, uint64_t set = 0);
  void mirrorAddressed();
  void shareMirrored();
  bool fetchTargets(transport::Connection& next, std::string& why) const;
  bool fetchAt(transport::Connection& next, uint64_t address, size_t bytes) const;  // under mutex_
  static CUresult take(Mirror& mirror, std::span<const unsigned char> runs);

  // Held across the calls that make and drop pieces; taken before every other lock here, and before
  // Transfers::named is entered: who waits for it inside, while its owner waits there for a new worker, would
  // keep the session from going on. Who holds it reads pieces_ and blocks_ without mutex_.
  std::mutex growing_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Piece> pieces_;
  std::map<uint64_t, size_t> blocks_;
  uint64_t nextAddress_ = 0;  // this and the next four under growing_
  uint64_t smallNext_ = 0, smallEnd_ = 0;
  std::multimap<size_t, uint64_t> freeAddresses_;
  std::vector<Parked> parked_;
  std::map<uint64_t, Arrival> arrivals_;  // between prepareMove() and moved(), by address
  std::deque<Landing> landings_;
  std::map<uint64_t, Mirror> mirrors_;  // by host address
  uint64_t mirrorSet_ = 0;              // this set's number
  std::set<uint64_t> symbolPages_;
  std::set<uint64_t> targets_;    // arena blocks that are the device's side of ordinary memory
  std::set<uint64_t> addressed_;  // one host: arena blocks that kernels address
  // What was noted last, for programs give the same addresses to kernels again and again: by a few bits of
  // it.
  static constexpr size_t kNoted = 64;
  static size_t notedAt(uint64_t address) { return (address >> 8 ^ address >> 14) % kNoted; }
  std::array<std::atomic<uint64_t>, kNoted> noted_{};
  bool regionAt(uint64_t address, transport::Region& region, uint64_t& start) const;
  bool lentAt(uint64_t address, transport::Region& region, uint64_t& start) const;
  bool isMirror(uint64_t host, uint64_t device) const;  // under mutex_
  bool isMirrored(uint64_t address) const {
    std::lock_guard lock(mutex_);
    return isMirror(address, address);
  }
  void insertMirror(Mirror mirror);
  void mirrorsChanged();                                     // under mutex_
  std::vector<Mirror*> allMirrors(uint64_t* set = nullptr);  // set: its number
  // Before a comparison. Sorted by where they lie. True: settle() of their heat comes behind it.
  bool lookAtWrites(std::span<Mirror* const> mirrors, bool cool);
  static CUresult sendChanges(Mirror& mirror, std::vector<unsigned char>& runs);
  struct Upload {
    uint64_t from = 0;
    size_t bytes = 0;
    uint64_t word = 0, value = 0;  // its stream's, when the copy is done
    uint64_t after = 0;            // the host function that began last before it
    bool overtaken = false;        // a copy to the same bytes was posted since
    bool overlaps(uint64_t address, size_t size) const {
      return from < address + size && address < from + bytes;
    }
  };
  void note(const Stream& stream, uint64_t from, size_t bytes);
  std::mutex resending_;
  std::map<uint64_t, uint64_t> openFunctions_;  // number -> its stream's word
  uint64_t nextFunction_ = 1;
  std::vector<Upload> uploads_;  // since the oldest open host function
  std::atomic<size_t> mirrorCount_{0};
  // One publish or collect at a time. But in a protected session, taken inside Transfers::alone only, or by
  // the mover.
  std::mutex mirrorMutex_;
  // Of a publish; under mirrorMutex_.
  std::vector<unsigned char> runs_;  // on their way
  std::vector<WrittenPages::Range> written_;
  std::chrono::steady_clock::time_point nextCooling_;
};

HostMemory& hostMemory();

}  // namespace gpupool::client
