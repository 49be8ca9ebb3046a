#pragma once
// Makes a session again in this worker from what its old one sends (session_state.h). Everything that comes
// is checked: against this build and this device, and, as in any session, call by call. Where the driver
// answers another value than the old one's did, for one that kernels may hold, the session is refused:
// nothing here continues with addresses that are not the program's.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "schema/record.capnp.h"
#include "server/copier/link.h"
#include "server/worker/account.h"
#include "server/worker/session.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

// While a session of this server is rebuilt, its memory is on the account already, as the old worker's. From
// `settle` on the account is the server's; for a session of another server, from the beginning.
class RebuildAccount final : public Account {
 public:
  explicit RebuildAccount(std::unique_ptr<Account> account) : account_(std::move(account)) {}
  void settle() { settled_ = true; }
  CUresult take(unsigned place, uint64_t bytes) override {
    if (settled_) return account_->take(place, bytes);
    account_->inherit(place, bytes);
    return CUDA_SUCCESS;
  }
  void give(unsigned place, uint64_t bytes) override {
    if (settled_)
      account_->give(place, bytes);
    else
      account_->disinherit(place, bytes);
  }
  uint64_t others(unsigned place) override { return settled_ ? account_->others(place) : 0; }
  CUresult offer(uint64_t piece, const Part& part, int descriptor, schema::ShareToken& token) override {
    return account_->offer(piece, part, descriptor, token);
  }
  CUresult open(const schema::ShareToken& token, Opened& opened) override {
    return account_->open(token, opened);
  }
  void endOffer(const schema::ShareToken& token, bool awaited) override {
    account_->endOffer(token, awaited);
  }
  void endPiece(uint64_t piece, unsigned place, uint64_t bytes) override {
    account_->endPiece(piece, place, bytes);
  }
  void close(uint64_t opening) override { account_->close(opening); }
  uint64_t number() const override { return account_->number(); }

 private:
  std::unique_ptr<Account> account_;
  std::atomic<bool> settled_{false};
};

class Rebuild {
 public:
  // Both live as long as this. stream: the old worker is on another machine (session_state.h). stopping: a
  // wait for the copier ends.
  Rebuild(const Driver& driver, StateSocket& socket, bool stream, std::function<bool()> stopping);
  ~Rebuild();
  Rebuild(const Rebuild&) = delete;
  Rebuild& operator=(const Rebuild&) = delete;

  // In this order. Each: "" or why not, for people.
  //
  // What the session is, or what of it comes ahead, without the contents of arrays and variables; in `pages`,
  // but not by a stream, its words and its staging memory, not registered.
  std::string receive(HostPages& pages);
  // After it: 1 + the device, by index, whose context was there before the session's first call, or 0. The
  // driver places code behind contexts: it must be there here, too, and no other.
  unsigned contextAhead() const;
  // After it: the session begins anew, and is what a new one is.
  bool beginsAnew() const;
  // In a session that has no connection yet.
  std::string make(Session& session);
  // Tells the old worker what has become of it.
  bool answer(const std::string& why);

 private:
  struct State;
  std::string judge() const;
  std::string receiveRecord();
  std::string receiveDescriptors(HostPages* pages);
  void takeLink(Descriptor copier);
  std::string begin(Session& session);
  std::string makeAhead(Session& session);
  std::string makeRest(Session& session);
  // Of a stream.
  std::string receiveImages(Session& session);
  std::string receiveImage(Session& session, const schema::ImageName& name);
  std::string receiveMemory(Session& session);
  std::string makeMemory(Session& session);
  void registerHost(Session& session);
  std::string bringIn(Session& session);
  std::string bringAcross(Session& session);
  bool hasRoomAhead() const;
  std::string repeatCalls(Session& session, bool ahead);
  std::string repeatCall(Session& session, schema::RecordEntry::Reader entry, CUresult& status);
  std::string settleView(Session& session, Call& call, std::span<const std::byte> wanted);
  std::string offerImages(Session& session);
  std::string adoptTimes(Session& session);
  std::string receiveContents(Session& session);
  std::string receiveVariables(Session& session);
  std::string receiveArrays(Session& session);
  std::string compareContents(Session& session);

  const Driver& driver_;
  StateSocket& socket_;
  std::function<bool()> stopping_;
  const bool stream_;
  std::unique_ptr<State> state_;
  std::unique_ptr<CopierLink> link_;
};

}  // namespace gpupool::server
