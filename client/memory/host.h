#pragma once
// Host memory that devices address. Pinned and managed memory lies in an arena that client and worker have at
// one address: on one host the same pages (a memfd), on a network a copy on each side.
//
//  * Copies on a network: `upload` puts pinned bytes into the worker's copy before a host-to-device copy;
//  `download` has
//    the worker put what a device-to-host copy brought into ours, before it tells that the copy is done.
//  * Mirrors keep two copies alike where kernels address memory that cannot be shared: mapped and managed
//  memory on a
//    network, registered memory and managed symbols everywhere. Before a launch the client's changes go out
//    (`publish`), at a synchronisation the worker's come back (`settle`). schema/mirror.h has the rules.
//
// Changes travel aside (schema/frame.h), so they are there before any frame sent after them.
//
// Threads: any. A host function's thread comes here too, while the worker's frames may wait for that
// function: of the locks it takes (resending_, mirrorMutex_, mutex_; in this order) none is held across a
// frame's wait.

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "client/streams.h"
#include "schema/mirror.h"
#include "transports/transport.h"

namespace gpupool::client {

class HostMemory {
 public:
  // What arena memory is for. copies: what else, shows later (mirrorArena). mirrored: kernels will address
  // it. target: the device's side of the application's own memory; its mirror is the caller's to add.
  enum class Use { copies, mirrored, target };
  // Bytes of the arena at an address both sides have.
  CUresult allocate(CUcontext context, size_t bytes, unsigned flags, Use use, uint64_t& address);
  CUresult release(CUcontext context, uint64_t address);
  // True if [address, + bytes) is arena memory.
  bool holds(uint64_t address, size_t bytes) const;

  // For a copy that is to be posted in `stream` next.
  CUresult upload(const Stream& stream, const void* from, size_t bytes);
  // While host functions are under way on a network, uploads are noted: a function may change bytes that a
  // copy behind it was to take, so they are sent again before its stream goes on.
  // Begins: its number.
  uint64_t hostFunctionBegins(const Stream& stream);
  void hostFunctionEnded(uint64_t function);
  static constexpr size_t kTravel = size_t{4} << 20;  // a large copy goes in pieces of this
  // Network: posts the copy of device memory at `from` to the arena at `to`.
  CUresult download(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes);

  // The application's memory at `host`, mirrored at `device`: arena memory for nothing else, or a symbol's
  // address. borrowed: ordinary memory that a graph copies (client/graphs.h).
  void addMirror(uint64_t host, uint64_t device, size_t bytes, bool borrowed = false);
  void removeMirror(uint64_t host, uint64_t device = 0);  // device 0: whichever it is
  // A managed symbol lies in the worker at `address`: this process gets memory of its own there, and a
  // mirror.
  CUresult adoptManagedSymbol(uint64_t address, size_t bytes);
  // The library of that symbol, if it is one, is about to be unloaded, and the worker's copy goes with it.
  void dropManagedSymbol(uint64_t address, size_t bytes);
  // Arena memory turned out to be addressed by kernels.
  void mirrorArena(uint64_t address);
  bool mirroring() const { return mirrorCount_.load(std::memory_order_relaxed) != 0; }
  CUresult publish();
  CUresult settle() { return mirroring() ? settleSlow() : CUDA_SUCCESS; }

 private:
  struct Piece {  // one mapping of the arena, cut into allocations
    size_t bytes = 0;
    transport::Region region;  // the worker's
    transport::Region lent;    // network: ours, which the worker puts into
    std::shared_ptr<transport::SharedMemory> memory;
    unsigned flags = 0;
    size_t used = 0;
    std::map<uint64_t, size_t> free;
  };
  struct Parked {  // released, and held by the transport perhaps
    uint64_t address = 0;
    size_t bytes = 0;
    std::shared_ptr<transport::SharedMemory> memory;
  };
  struct Mirror {
    uint64_t host = 0, device = 0;
    size_t bytes = 0;
    bool borrowed =
        false;  // the application may unmap it without telling: read and written through the kernel
    schema::MirrorBase base;
  };
  struct Landing {  // bytes under way to us, until the word has that value
    uint64_t word = 0, value = 0;
    uint64_t to = 0;
    size_t bytes = 0;
  };
  using PieceAt = std::map<uint64_t, Piece>::iterator;
  CUresult addPiece(CUcontext context, size_t bytes, unsigned flags, PieceAt& made);
  PieceAt pieceWithRoom(size_t bytes, uint64_t& address);
  // Gives a block back to its piece. True: the piece is free now and not kept.
  bool freeBlock(PieceAt piece, uint64_t address, size_t bytes);
  std::map<uint64_t, Piece>::const_iterator pieceOf(uint64_t address) const;
  bool unmapParked();
  CUresult settleSlow();
  CUresult awaitLandings(uint64_t address, size_t bytes);
  CUresult collect(std::span<Mirror* const> mirrors);
  static CUresult take(Mirror& mirror, std::span<const unsigned char> runs);

  // Held across the calls that make and drop pieces; taken before every other lock here. Who holds it reads
  // pieces_ and blocks_ without mutex_.
  std::mutex growing_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Piece> pieces_;
  std::map<uint64_t, size_t> blocks_;
  uint64_t nextAddress_ = 0;  // this and the next two under growing_
  std::multimap<size_t, uint64_t> freeAddresses_;
  std::vector<Parked> parked_;
  std::deque<Landing> landings_;
  std::multimap<uint64_t, Mirror>
      mirrors_;  // by host address; graphs may mirror overlapping parts of ordinary memory
  std::set<uint64_t> symbolPages_;
  std::set<uint64_t> targets_;  // arena blocks that are the device's side of ordinary memory
  CUresult putRange(const void* from, size_t bytes);
  bool isMirror(uint64_t host, uint64_t device) const;  // under mutex_
  void insertMirror(Mirror mirror);
  std::vector<Mirror*> allMirrors();
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
  std::mutex mirrorMutex_;  // one publish or collect at a time
};

HostMemory& hostMemory();

// The function reads what the work before it wrote to host memory, and the work behind it what it wrote.
void carryBytes(Session::HostFunction& function);

}  // namespace gpupool::client
