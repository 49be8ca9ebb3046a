#pragma once
// What happens in the pool, as server-sent events (the HTML standard's): each time a lease or a server is in
// another state than it was. Nothing is looked at while nobody reads. One thread.
//
// The pool is compared with what it was, several times a second, once for all readers. What is in a state for
// shorter than that is not told. The latest events are kept, so that a reader may come back; one that is so
// slow that it misses some is told to read the lists again, and one that takes nothing at all is cut off
// (http_front.h).

#include <kj/timer.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "pool-manager/peer_count.h"
#include "pool-manager/rest/exchange.h"
#include "pool-manager/service.h"

namespace gpupool::pool::rest {

class Events {
 public:
  // Both outlive it; it outlives the answers.
  Events(kj::Timer& timer, Service& service) : timer_(timer), service_(service) {}

  // A stream that ends when its reader goes. Throws a Problem if there are too many.
  Answer subscribe(const Request& request);

 private:
  struct Event {
    const char* kind;
    Json data;
    std::string tenant;  // of a lease: whose it is
    bool ofLease;
  };
  struct Known {
    std::string state, tenant, holder, server;
  };
  struct Reader {
    Principal who;
    uint64_t next = 0;  // the number of the first event that it has not been told
    bool lost = false;  // it has missed some
    kj::TimePoint told = kj::origin<kj::TimePoint>();
    std::shared_ptr<void> place, ofAll;
    std::string text;  // on its way
  };

  void look();
  void compareLeases(bool tell);
  void compareServers(bool tell);
  void addLease(const Id& id, const Known& lease, const std::string& was, const std::string& reason);
  void add(Event event);
  std::string render(const Event& event, uint64_t number, const Principal& who) const;
  std::string newsFor(Reader& reader);
  kj::Promise<void> tell(std::shared_ptr<Reader> reader, kj::AsyncOutputStream& out);

  kj::Timer& timer_;
  Service& service_;
  PeerCount readers_{"readers of events", 8}, all_{"readers of events", 64};
  kj::TimePoint looked_ = kj::origin<kj::TimePoint>();
  std::string life_;    // part of each event's id: numbers begin again
  uint64_t first_ = 1;  // the number of the first event that is kept
  std::deque<Event> kept_;
  std::map<Id, Known> leases_;
  std::map<std::string, std::string> servers_;  // state, by server
};

}  // namespace gpupool::pool::rest
