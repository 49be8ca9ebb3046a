#pragma once
// The session's memory in this process: device windows and extents in them, pinned host memory, module
// globals. Every address from the wire is checked against it, once, before the driver sees it: without that,
// unified addressing would let a client read the worker's own heap.
//
// Threads: any. Two mutexes: one for what calls the driver, which may block there (server/worker/session.h),
// and one for the tables, held for a look-up only. A third lets one offer at a time go to the server.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "schema/hello.h"
#include "server/driver.h"
#include "server/worker/account.h"
#include "server/worker/scrubber.h"
#include "transports/transport.h"

namespace gpupool::server {

class Space {
 public:
  Space(const Driver& driver, std::vector<CUdevice> devices, Account& account);
  ~Space();
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  // Reserves the first candidate of `offered` (bits) that this process can have; its index, or -1 with
  // `reason`.
  int reserve(uint32_t offered, std::string& reason);

  // The index of what was reserved; -1: nothing yet.
  int reserved() const { return reserved_; }

  // A context is about to end: nothing of ours may live there.
  void contextEnds();
  // The session has this context of `device`, made now or known before; nothing has been loaded in a new one.
  void contextMade(CUcontext context, unsigned device);
  // It has ended. True: pinned memory has lost its registration.
  bool contextEnded(CUcontext context);

  // Physical memory, and its mappings. A piece lives as long as it has its name or a mapping; it is cleared
  // before anybody can read it, and keeps its bytes from then on. Names a new piece; the client chooses the
  // name.
  CUresult createPhysical(unsigned device, uint64_t name, size_t bytes);
  CUresult releasePhysical(uint64_t name);
  // Maps the whole piece at `address`, for nobody to access until setAccess. As often as one likes.
  CUresult mapPhysical(uint64_t name, CUdeviceptr address);
  // Of a mapping of mapPhysical, for one device.
  CUresult setAccess(CUdeviceptr address, unsigned device, CUmemAccess_flags flags);
  // A piece without a name, mapped once: for memory that the client cuts up itself. Accessible to its device,
  // to those of the session's contexts that can reach it, and to those that allowPeer names.
  CUresult mapExtent(unsigned device, CUdeviceptr address, size_t bytes);
  // Ends a mapping of either kind.
  CUresult unmapExtent(CUdeviceptr address);
  // Opens every extent, present and future, of `device` to `peer`.
  CUresult allowPeer(unsigned device, unsigned peer);

  // Pinned memory at `address` of the host arena; needs a current context.
  CUresult mapHost(uint64_t address, size_t bytes, unsigned flags,
                   std::shared_ptr<transport::SharedMemory>& memory);
  // The same with pages of a file of the client's, `bytes` of which `map` maps at an address; null: it
  // cannot.
  CUresult mapFile(uint64_t address, size_t bytes,
                   const std::function<std::shared_ptr<transport::SharedMemory>(void* at)>& map);
  // How many there are.
  size_t files() const { return files_.load(std::memory_order_acquire); }
  CUresult unmapHost(uint64_t address);
  // True: nothing that was unmapped there is held by anybody still, to be read or written to. mapHost needs
  // that: the old memory's end would take the new one's addresses.
  bool hostReleased(uint64_t address, size_t bytes);

  // Registers pinned memory that has outlived its context, in the current one. The client gives back what a
  // context has before it ends it, but for what graphs still hold.
  void registerHostAgain();
  // The piece at that address in the current context, and in no other: a registration ends with its context,
  // and what other contexts have queued on the memory then faults. Nothing is queued now.
  void registerHostHere(uint64_t address);
  // That it is registered in; null: in none.
  CUcontext hostContext(uint64_t address) const;
  // A global whose address the client knows. managed: the host may access it, too.
  struct Global {
    CUdeviceptr address = 0;
    size_t bytes = 0;
    bool managed = false;
  };
  // Of the module or library `owner`.
  void addGlobal(uint64_t owner, const Global& global);
  // Whether the client knows the address of a managed one of that owner.
  bool hasManaged(uint64_t owner) const;
  // Its code goes, and their memory with it: they are the session's no more.
  std::vector<Global> takeGlobals(uint64_t owner);

  // True if [address, + bytes) is the session's: inside one window, host piece or global.
  bool owns(uint64_t address, size_t bytes);
  // True if it is host memory of the session (arena or staging).
  bool ownsHost(uint64_t address, size_t bytes);
  void addStaging(std::shared_ptr<transport::SharedMemory> memory);
  // The piece of the arena or the staging memory that holds [address, + bytes); null if none does. As long as
  // it is held, the bytes can be read, whatever the client unmaps.
  std::shared_ptr<transport::SharedMemory> hostMemory(uint64_t address, size_t bytes) const;

  // --- sharing (space_share.cpp): pieces that several sessions of the lease have
  // Offers [address, + bytes) of the extent that is mapped there, or all of the piece of that name. The
  // piece is cleared first, where nobody could read it so far.
  CUresult offer(uint64_t name, CUdeviceptr address, size_t bytes, schema::ShareToken& token);
  // Names a piece of another session.
  struct OpenedPiece {
    unsigned device = 0;
    uint64_t bytes = 0, offset = 0, length = 0;
  };
  CUresult open(const schema::ShareToken& token, uint64_t name, OpenedPiece& opened);
  // Pieces that were offered, or are another session's, and live here.
  size_t shared() const { return shared_.load(std::memory_order_acquire); }

  // Physical memory of a device, mapped or not.
  uint64_t physicalBytes(unsigned device) const;

  // --- suspending (space_suspend.cpp). Only while nothing else of the session uses device memory; with a
  // context current. The addresses, the mappings and the account stay as they are.
  struct Piece {
    unsigned device = 0;  // of the lease
    size_t bytes = 0;
  };
  // All physical memory there is. The calls below go by the index into it.
  std::vector<Piece> takeStock();
  size_t pieces() const { return stock_.size(); }
  // A descriptor of the memory, for the caller to close; -1: the driver gives none, and the log says why.
  int exportPiece(size_t index) const;
  // Unmaps and releases it: the device has its memory back, and its bytes are gone.
  void letGo(size_t index);
  // New memory for everything that was let go of, mapped and accessible as before, with undefined bytes. All
  // or nothing.
  CUresult comeBack();

  // --- memory of the lease for a moment (space_spare.cpp): mapped somewhere, for its own device alone.
  struct Spare {
    unsigned device = 0;
    size_t bytes = 0;  // 0: none
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle handle = 0;
  };
  // None where other sessions have a part in the lease.
  CUresult makeSpare(unsigned device, size_t bytes, Spare& spare);
  void endSpare(Spare& spare);
  // Where there is no room: `ends` is called, and may make some. True: it has.
  void onFull(std::function<bool()> ends) { full_ = std::move(ends); }

  // --- moving to another worker (space_move.cpp). There, before anything else was mapped.
  struct MappingState {
    CUdeviceptr address = 0;
    bool ofClient = false;
    std::map<unsigned, CUmemAccess_flags> access;
  };
  struct PieceState {
    unsigned device = 0;
    size_t bytes = 0;
    uint64_t name = 0;  // 0: none
    std::vector<MappingState> mappings;
  };
  // In the order of takeStock, which came before.
  std::vector<PieceState> describe() const;
  std::vector<uint32_t> peers() const { return peers_; }
  // As if everything had been let go of: comeBack makes the memory. "" or why not.
  std::string adopt(const std::vector<PieceState>& pieces, const std::vector<uint32_t>& peers);
  // Pinned memory by address.
  std::map<uint64_t, std::shared_ptr<transport::SharedMemory>> hostPieces() const;
  // The pinned memory at `address` has the pages of `pages` from here on. Nothing of the device's is under
  // way there. "", or why not. Another context may be current behind it.
  std::string exchangeHost(uint64_t address, const transport::SharedMemory& pages);
  // Registered in the next context that becomes current. descriptor: -1: fresh memory. False: it does not fit
  // the arena, or there is none.
  bool adoptHost(uint64_t address, int descriptor, size_t bytes);
  // An address at which the piece's own device reads and writes it, until closePiece: one of its mappings, or
  // one made for this where all of them are closed to it. Several threads may have a piece open: each closes
  // it as often as it opens it.
  CUresult openPiece(size_t index, CUdeviceptr& address);
  void closePiece(size_t index, CUdeviceptr address);
  // That one is a mapping of the session: it is there behind closePiece, too.
  bool staysOpen(size_t index, CUdeviceptr address) const;
  // While a session is rebuilt: a call that is repeated may name pinned memory that is gone, a copy node,
  // say, that was given another address later. It gets memory for as long as `repeating` is set. Needs a
  // current context.
  void setRepeating(bool repeating);

 private:
  struct HostPiece {
    std::shared_ptr<transport::SharedMemory> memory;
    CUcontext context = nullptr;  // that registered it; null: it has ended
  };
  struct Physical {
    unsigned device = 0;
    size_t bytes = 0;
    CUmemGenericAllocationHandle handle =
        0;               // exportable: for checkpoints, and for sharing with other processes
    bool clean = false;  // holds nothing of an earlier owner
    bool named = false;
    size_t mappings = 0;
    uint64_t offered = 0;  // this session's number of the piece, once a part of it was offered
    uint64_t opening = 0;  // another session has made it, and has it on its account
  };
  struct Mapping {
    std::shared_ptr<Physical> physical;
    bool ofClient = false;                         // of mapPhysical
    std::map<unsigned, CUmemAccess_flags> access;  // ofClient: by device, what setAccess said last
  };
  struct Stock {
    std::shared_ptr<Physical> physical;
    std::vector<CUdeviceptr> mappedAt;
  };
  // These two are the only places where physical memory of a device begins and ends. makePhysical asks the
  // server for room in the lease: no lock is held.
  CUresult makePhysical(unsigned device, size_t bytes, std::shared_ptr<Physical>& made);
  CUresult tryPhysical(unsigned device, size_t bytes, std::shared_ptr<Physical>& made);
  void endUnused(Physical& physical);
  void dropReleased();

  bool lend(uint64_t address, size_t bytes);
  CUresult keepHost(uint64_t address, std::shared_ptr<transport::SharedMemory> memory);  // under mapping_
  bool registerPiece(HostPiece& piece, CUcontext context);                               // likewise
  bool inArena(uint64_t address, size_t bytes) const;  // and free there; under mapping_
  bool inWindow(CUdeviceptr address, size_t bytes) const;
  bool isFree(CUdeviceptr address, size_t bytes) const;  // under mapping_
  CUresult map(const std::shared_ptr<Physical>& physical, CUdeviceptr address, bool ofClient);
  CUresult open(const Physical& physical, CUdeviceptr address);
  void openToOthers(unsigned device);
  CUresult allow(unsigned device, unsigned peer);
  CUresult scrub(Physical& physical, CUdeviceptr address);
  CUresult scrubElsewhere(const Physical& physical, CUdeviceptr address);
  CUresult create(Physical& physical) const;
  CUresult clear(Physical& physical);
  // Maps a piece somewhere for a moment, for its own device alone: at addresses that are reserved with the
  // windows and stay so. What the driver gets back it places variables of code in, which a rebuilt session
  // would have elsewhere.
  CUresult mapAside(unsigned device, CUmemGenericAllocationHandle handle, size_t bytes, CUdeviceptr& address);
  void unmapAside(CUdeviceptr address, size_t bytes);
  void reserveAside();
  CUdeviceptr takeAside(size_t bytes);  // 0: there are not so many
  std::shared_ptr<Physical> pieceAt(uint64_t name, CUdeviceptr address, size_t bytes, uint64_t& offset) const;
  CUresult mapAgain(const Stock& stock);

  const Driver& driver_;
  std::vector<CUdevice> devices_;
  Account& account_;
  schema::AddressSpace layout_{};
  int reserved_ = -1;
  std::vector<CUdeviceptr> windows_;
  std::vector<uint32_t> peers_;  // bit p of peers_[d]: device p may access d's extents
  uint32_t withContext_ = 0;     // bit d: the session has had a context of device d
  mutable std::mutex mapping_;   // taken before mutex_; alone it lets nobody change mappings_ and host_
  mutable std::mutex mutex_;
  std::map<CUdeviceptr, Mapping> mappings_;
  std::vector<Stock> stock_;  // of takeStock
  std::map<uint64_t, std::shared_ptr<Physical>> named_;
  std::map<CUcontext, Scrubber> scrubbers_;  // under mapping_
  std::vector<uint64_t> used_;               // bytes of physical memory by device
  std::map<uint64_t, HostPiece> host_;
  std::mutex offering_;  // one offer at a time; taken before mapping_
  uint64_t nextOffered_ = 1;
  struct OpenAside {
    CUdeviceptr address = 0;
    size_t users = 0;
  };
  std::map<size_t, OpenAside> openAside_;  // by piece; under mapping_
  std::mutex asideMutex_;
  CUdeviceptr aside_ = 0;  // what mapAside takes
  uint64_t asideBytes_ = 0, asideUsed_ = 0;
  std::atomic<size_t> shared_{0};
  std::atomic<size_t> files_{0};  // of host_: a client's files
  bool repeating_ = false;
  std::function<bool()> full_;
  std::vector<uint64_t> lent_;                                      // of host_: while repeating_
  std::vector<std::shared_ptr<transport::SharedMemory>> released_;  // under mapping_: perhaps held still
  std::shared_ptr<transport::SharedMemory> staging_;
  std::map<uint64_t, size_t> hostRanges_;
  std::map<uint64_t, size_t> globals_;
  std::map<uint64_t, std::set<uint64_t>> globalsOf_;  // owner -> addresses
};

}  // namespace gpupool::server
