#pragma once
// One endpoint of UCX between client and worker: set-up over the bootstrap socket, active messages, and the
// end.
//
// The worker listens on a port of its own and sends its number, with a nonce, over the bootstrap socket. Only
// the endpoint that presents the nonce becomes the connection. Used by one thread at a time (set-up, then the
// progress thread).

#include <functional>
#include <list>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "transports/descriptor.h"
#include "transports/transport.h"
#include "transports/ucx_library.h"
#include "transports/ucx_memory.h"
#include "transports/ucx_wire.h"
#include "transports/waiting.h"

namespace gpupool::transport {

enum class WireKind : uint32_t {
  hello = 1,  // client: the nonce in number, offset
  welcome,    // worker: accepted
  messages,  // payload: whole records of `channel` from position `number`; to be delivered after put `landed`
  credit,    // the consumer of `channel` is at position `number`
  put,       // payload for `region` at `offset`; puts are numbered from 1 without gaps
  putDone,   // answers put `number`; channel: 0 landed, 1 refused
  get,       // asks for `length` bytes of `region` at `offset`
  getData,   // answers get `number`, with the payload; channel: 0 ok, 1 refused
  region,    // `region` of `length` bytes can be used; with RDMA, a client adds where it is (PeerMemory)
  withdraw,  // and no longer
  goodbye,   // the sender's last positions: number (call), offset (control)
  goodbyeSeen,  // everything up to the goodbye was delivered
  // RDMA only: the worker moves the bytes, the client gets no key to the worker's memory.
  fetch,   // client: as put, but the payload says where the bytes are (PeerMemory), and the worker gets them
  fill,    // client: as get, and the payload says where the bytes are to go; answered by filled
  filled,  // worker: answers fill `number`; channel: 0 done, 1 refused
  placed,  // worker: put `number` of `length` bytes is in the client's memory, or will never be (channel 1)
  withdrawn,  // worker: nothing touches the withdrawn `region` any more
};

// Its payload ends in a region of the peer; such requests are numbered.
inline bool isPut(WireKind kind) { return kind == WireKind::put || kind == WireKind::fetch; }

struct WireHeader {
  WireKind kind{};
  uint32_t channel = 0;
  uint64_t number = 0;
  Region region{};
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t landed = 0;
};
static_assert(sizeof(WireHeader) == 48);

// The first message of the worker on the bootstrap socket. To an offer of RDMA the client answers 'y' and
// connects, or 'n' and is greeted once more, with TCP.
struct UcxGreeting {
  uint64_t magic = 0;
  uint32_t protocol = 0;
  uint32_t addressBytes = 0;
  uint32_t rdma = 0;
  uint32_t reserved = 0;
  uint64_t nonce[2] = {};
  uint64_t callBytes = 0;
  uint64_t controlBytes = 0;
  char version[16] = {};        // of UCX, for people
  std::byte address[128] = {};  // sockaddr of the listener
};

class UcxLink {
 public:
  class Sink {
   public:
    // Within progress(). `rendezvous`: `data` must go to receive(), or is dropped by returning false. True:
    // kept.
    virtual bool received(const WireHeader& header, void* data, size_t length, bool rendezvous) = 0;
    virtual void failed(const std::string& why) = 0;

   protected:
    ~Sink() = default;
  };
  using Done = std::function<void(bool)>;

  // Either throws std::runtime_error. `bootstrap` is borrowed. On return the peer is connected.
  static std::unique_ptr<UcxLink> accept(int bootstrap, const Options& options, UcxGreeting& greeting);
  static std::unique_ptr<UcxLink> connect(int bootstrap, const Options& options, UcxGreeting& greeting);
  // UCX and its modules, which it loads with the first context of a process.
  static void load();
  ~UcxLink();
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  // What arrives before it is dropped, so: the client sets its sink, then sends `ready`; the worker sets its
  // sink, then waits for that, and only then may send. Both throw std::runtime_error.
  void setSink(Sink* sink) { sink_ = sink; }
  static void sayReady(int bootstrap, TimeLeft& time);
  void awaitReady(int bootstrap, TimeLeft& time);
  // Sends header and payload; `payload` stays valid until `done`, which comes within send or progress.
  // flags: UCP_AM_SEND_FLAG_EAGER, UCP_AM_SEND_FLAG_RNDV or 0.
  void send(const WireHeader& header, const void* payload, size_t bytes, uint32_t flags, Done done);
  // Receives what arrived by rendezvous into `to`.
  void receive(void* data, void* to, size_t bytes, Done done);

  // One-sided transfers, where rdma(). A key is the peer's, for one range of its memory; null: UCX refuses
  // it. `local` is registered for the transfer if `registered` is null.
  bool rdma() const { return registered_ != nullptr; }
  const std::shared_ptr<UcxMemory>& registered() const { return registered_; }
  std::shared_ptr<ucp_rkey> unpackKey(std::span<const std::byte> packed);
  void get(void* local, size_t bytes, uint64_t remote, ucp_rkey_h key, const Registration* registered,
           Done done);
  // Done when the peer's memory has the bytes.
  void put(const void* local, size_t bytes, uint64_t remote, ucp_rkey_h key, const Registration* registered,
           Done done);

  // True if something happened.
  bool progress() { return ucx_.ucp_worker_progress(worker_) != 0; }
  // True: nothing to do, and descriptor() becomes readable when there is.
  bool arm() { return ucx_.ucp_worker_arm(worker_) == UCS_OK; }
  int descriptor() const { return eventDescriptor_; }
  // Ends the endpoint by force: after it returns, no buffer that was given to send or receive is touched any
  // more.
  void shutdown();
  size_t operations() const { return operations_.size(); }

 private:
  struct Operation {
    UcxLink* link;
    WireHeader header;
    Done done;
    std::list<std::unique_ptr<Operation>>::iterator self;
  };

  friend struct UcxSeam;  // tests/fuzz: without a peer
  UcxLink(const Options& options, const UcxWire& wire, bool worker);
  void configure(ucp_config_t* config, const Options& options, const UcxWire& wire);
  static std::unique_ptr<UcxLink> listening(const Options& options, const UcxWire& wire,
                                            const std::string& address);
  void greet(int bootstrap, UcxGreeting& greeting, TimeLeft& time);
  static std::unique_ptr<UcxLink> takeOffer(int bootstrap, const Options& options, UcxGreeting& greeting,
                                            sockaddr_storage& target, TimeLeft& time);
  void flush(Done done);
  void watch(ucs_status_ptr_t result, Operation* operation);
  void listen(const std::string& address);
  void awaitClient(int bootstrap, TimeLeft& time);
  void awaitWelcome(int bootstrap, TimeLeft& time);
  ucp_ep_h createEndpoint(ucp_ep_params_t& params);
  void closeEndpoint(ucp_ep_h endpoint);
  void setupStep(int bootstrap, TimeLeft& time, const char* what);
  void takeConnections();
  Operation* newOperation(const WireHeader& header, Done done);
  void finish(Operation* operation, ucs_status_t status);
  void fail(ucs_status_t status);
  void check(ucs_status_t status, const char* what) const;

  static void onConnection(ucp_conn_request_h request, void* self);
  static void onError(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t onMessage(void* self, const void* header, size_t headerBytes, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param);
  static void onSent(void* request, ucs_status_t status, void* operation);
  static void onReceived(void* request, ucs_status_t status, size_t bytes, void* operation);

  const UcxLibrary& ucx_;
  Sink* sink_ = nullptr;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  int eventDescriptor_ = -1;  // UCX's
  std::vector<ucp_conn_request_h> requests_;
  std::vector<ucp_ep_h> candidates_;  // connected, but have not presented the nonce yet
  uint64_t nonce_[2] = {};
  bool welcomed_ = false;
  bool finished_ = false;
  std::string failure_;
  std::shared_ptr<UcxMemory> registered_;
  std::shared_ptr<std::set<ucp_rkey_h>> keys_;        // that were not destroyed yet
  std::list<std::unique_ptr<Operation>> operations_;  // under way
};

}  // namespace gpupool::transport
