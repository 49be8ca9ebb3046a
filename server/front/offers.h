#pragma once
// What sessions of a tenant share: parts of pieces of memory that one session offers and others open, of its
// lease, or of another one that may (mayShare). Pure bookkeeping, and the descriptors.
//
// A place is a device of a lease. Who opens memory of another lease has to have that device, too: his worker
// sees no other. The piece stays charged to the lease of which it is, and so that one's reservation has to
// outlive it: `borrowers` says who has a lease's memory still.
//
// An offer ends by its session's word, or with its piece. A piece ends with its session at the latest;
// whoever has opened a part of it keeps it, and then it has an heir: a name for the account, to which the
// piece is charged until the last of them has closed it. Belongs to the event loop's thread.

#include <kj/io.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "schema/id.h"
#include "server/front/share_receipts.h"

namespace gpupool::server {

class Offers {
 public:
  using AccountName = SharedPiece::AccountName;
  static constexpr size_t kMostOffers = 16384;          // of one session; so many openings, too
  static constexpr uint64_t kHeir = uint64_t{1} << 63;  // no session has a number that large

  struct Token {
    Id server, key;
  };
  struct Part {
    uint64_t piece = 0;  // the offering worker's own number of it
    uint32_t place = 0;
    uint64_t bytes = 0;               // of the piece
    uint64_t offset = 0, length = 0;  // of what is offered
  };
  // elsewhere: of another tenant or server, or of an earlier life of this one. otherDevice: it is on a device
  // that the opening lease does not have.
  enum class Refusal { none, unknown, elsewhere, otherDevice, own, tooMany };
  struct Asker {
    AccountName account;
    uint64_t session = 0;
    std::vector<std::string> devices = {};  // uuids, by place
  };
  // May a session of `lease` open what one of `owner` offers? Asked of different leases only.
  using MayShare = std::function<bool(const Id& owner, const Id& lease)>;
  // So much of the place is charged to `to` from here on, instead of to `from`; to 0: to nobody.
  struct Charge {
    AccountName account;
    uint64_t from = 0, to = 0;
    uint32_t place = 0;
    uint64_t bytes = 0;
  };
  struct Opened {
    uint64_t opening = 0;
    Part part;
    int descriptor = -1;  // stays this table's
  };

  // What a session that was readopted had in an earlier life of this server (server/front/readoption.h).
  struct Earlier {
    AccountName account;
    uint64_t session = 0;
    std::map<uint64_t, std::pair<SharedPiece, kj::AutoCloseFd>> pieces;  // its own, by their ids
    struct Offered {
      Id key;
      uint64_t piece = 0, offset = 0, length = 0;
    };
    std::vector<Offered> offers;
    std::map<uint64_t, SharedPiece> openings;  // by number
  };
  // Says of a placement whether its lease is one here, that goes on or ends.
  using IsHere = std::function<bool(const AccountName&)>;

  // mostPieces: of all sessions together; each has a descriptor. server, life: StoredSharing's. Pieces and
  // openings of a life have numbers that no other has.
  explicit Offers(size_t mostPieces, Id server = Id::random(), uint32_t life = 0)
      : server_(server),
        mostPieces_(mostPieces),
        first_(uint64_t{life} << 32 | 1),
        nextPiece_(first_),
        nextOpening_(first_) {}

  // Of a piece that is known already, the descriptor is dropped.
  Refusal offer(const Asker& owner, const Part& part, kj::AutoCloseFd descriptor, Token& token);
  void endOffer(uint64_t session, const Token& token);
  // Nothing: there is no such piece.
  std::optional<Charge> endPiece(uint64_t session, uint64_t piece);
  // The place in `opened` is the asker's.
  Refusal open(const Asker& asker, const Token& token, const MayShare& mayShare, Opened& opened);
  // A charge: it was the last one of a piece that has ended.
  std::optional<Charge> close(uint64_t session, uint64_t opening);
  // Of something that is offered: its piece.
  SharedPiece pieceOf(const Token& token) const;
  // All that is still shared of an earlier life's. What no owner names has none any more, and so gets an
  // heir: that is what the charges say, from nobody. Nobody's any more is what is of no lease here.
  std::vector<Charge> restore(std::vector<Earlier> all, const IsHere& isHere);
  // The session has ended. In the order in which they count.
  std::vector<Charge> leave(uint64_t session);
  // The sessions that have parts of pieces in that place in common with this one, in either direction.
  std::set<uint64_t> sharers(uint64_t session, uint32_t place) const;
  // The sessions of other leases that have device memory of this one. deviceEpoch: of its placement of that
  // epoch; 0: of any.
  std::set<uint64_t> borrowers(const Id& lease, uint64_t deviceEpoch = 0) const;
  // The leases of which there are some.
  std::set<Id> lenders() const;

  const Id& server() const { return server_; }
  size_t pieces() const { return pieces_.size(); }
  size_t mostPieces() const { return mostPieces_; }

 private:
  struct Piece {
    AccountName account;
    uint64_t session = 0;  // 0: it has ended there
    Part whole;
    std::string device;  // its uuid; empty: it is host memory
    kj::AutoCloseFd descriptor;
    std::set<Id> offers;
    std::map<std::pair<uint64_t, uint64_t>, Id> openings;  // session and number -> lease
    // Host memory: sessions that have closed it, and may have marks in it that their streams still have to
    // write.
    std::set<uint64_t> former;
    // Device memory that this opening's lease has of another one.
    bool lends(const Id& lease) const { return !device.empty() && lease != account.first; }
  };
  struct Offer {
    uint64_t piece = 0;
    Part part;
  };
  std::map<uint64_t, Piece>::iterator find(uint64_t session, uint64_t piece);
  Charge end(std::map<uint64_t, Piece>::iterator piece);
  void addOffer(std::map<uint64_t, Piece>::iterator piece, const Id& key, uint64_t offset, uint64_t length);
  void addOpening(std::map<uint64_t, Piece>::iterator piece, uint64_t session, uint64_t opening,
                  const Id& lease);
  void restorePiece(const SharedPiece& piece, kj::AutoCloseFd descriptor);
  void restoreOffer(uint64_t session, const Earlier::Offered& offered);
  std::optional<Charge> restoreOpening(const Earlier& who, uint64_t opening, const SharedPiece& of,
                                       const IsHere& isHere);

  Id server_;
  size_t mostPieces_;
  uint64_t first_, nextPiece_, nextOpening_;
  std::map<uint64_t, Piece> pieces_;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> known_;  // session and its number of a piece -> piece
  std::map<Id, Offer> offers_;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> openings_;  // session and opening -> piece
  std::map<uint64_t, size_t> offersOf_, openingsOf_;            // by session
};

}  // namespace gpupool::server
