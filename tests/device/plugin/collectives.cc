// Each ordered pair of ranks of a communicator has a Unix socket of its own. A message begins with a header that
// says what the sender does; a receiver that does something else names both ranks, where hardware would hang.
#include "collectives.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "counters.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "stream.h"

namespace reference {

using Bytes = std::vector<char>;

struct Header {
  char operation[24];
  uint32_t type;
  uint32_t root;    // of broadcast and reduce
  uint64_t bytes;
  uint64_t number;  // of the collective, in its communicator, or of the message, between its two ranks
};

static std::string described(const Header& header) {
  return std::string(header.operation) + " number " + std::to_string(header.number) + " of " +
         std::to_string(header.bytes) + " bytes, type " + std::to_string(header.type) + ", root " +
         std::to_string(header.root);
}

static size_t width_of(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case FLOAT16: case BFLOAT16: case INT16: case UINT16: return 2;
    case FLOAT32: case INT32: case UINT32: return 4;
    case COMPLEX128: return 16;
    default: return 8;
  }
}

// What one rank sends another. A thread of its own writes, so that a send of any size ends at once.
class Outbox {
 public:
  explicit Outbox(int socket) : socket_(socket) { std::thread([this] { run(); }).detach(); }
  void put(Bytes message) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(message));
    changed_.notify_one();
  }
  int socket() const { return socket_; }

 private:
  void run() {
    for (;;) {
      Bytes message;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        message = std::move(queue_.front());
        queue_.pop_front();
      }
      for (size_t at = 0; at < message.size();) {
        ssize_t sent = send(socket_, message.data() + at, message.size() - at, MSG_NOSIGNAL);
        if (sent <= 0) return;  // the peer has gone: the operations that need it wait, as on hardware
        at += sent;
      }
    }
  }

  int socket_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Bytes> queue_;
};

// Wait as long as the option allows; hardware would wait for ever.
static void read_all(int socket, void* to, size_t bytes) {
  auto* at = static_cast<char*>(to);
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(Options::get().number("TIMEOUT_S"));
  while (bytes) {
    pollfd wanted{socket, POLLIN, 0};
    poll(&wanted, 1, 100);
    ssize_t got = recv(socket, at, bytes, MSG_DONTWAIT);
    if (got > 0) {
      at += got;
      bytes -= got;
      continue;
    }
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("a peer did not come");
    if (got == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace reference

// A communicator. Its operations run in the order in which the host called for them, on whatever stream.
struct C_CCLComm_st {
  std::string name;
  int rank, size;
  std::vector<reference::Outbox*> out;
  std::vector<int> in;
  std::vector<uint64_t> num_sent, num_received;  // messages between two ranks, by peer
  std::mutex mutex;
  std::condition_variable turned;
  uint64_t num_called = 0, num_done = 0;  // operations, messages too
  uint64_t num_collectives = 0;           // called; the same on all ranks
};

namespace reference {

static Header header_of(const char* operation, C_DataType type, size_t bytes, uint64_t number, size_t root = 0) {
  Header header{};
  std::strncpy(header.operation, operation, sizeof header.operation - 1);
  header.type = type;
  header.root = root;
  header.bytes = bytes;
  header.number = number;
  return header;
}

static void send_to(C_CCLComm comm, int peer, const Header& header, const void* from) {
  Bytes message(sizeof header + header.bytes);
  std::memcpy(message.data(), &header, sizeof header);
  std::memcpy(message.data() + sizeof header, from, header.bytes);
  comm->out[peer]->put(std::move(message));
}

static void receive_from(C_CCLComm comm, int peer, const Header& expected, void* to) {
  Header header;
  read_all(comm->in[peer], &header, sizeof header);
  if (std::memcmp(&header, &expected, sizeof header) != 0)
    throw std::runtime_error("rank " + std::to_string(peer) + " of the group does " + described(header) + ", rank " +
                             std::to_string(comm->rank) + " does " + described(expected));
  read_all(comm->in[peer], to, header.bytes);
}

// Take a place in the order of the communicator, and run `work` in the stream when its turn has come.
template <class Work>
static C_Status enqueue(const char* operation, C_CCLComm comm, C_Stream stream, size_t bytes, Work work,
                        bool is_message = false) {
  static std::atomic<long> num_collectives{0};
  Counters::get().add(operation, bytes);
  long hangs = Options::get().number("HANG_COLLECTIVE");
  bool never_ends = hangs != 0 && ++num_collectives == hangs;
  uint64_t place, number = 0;
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    place = comm->num_called++;
    if (!is_message) number = comm->num_collectives++;
  }
  stream->put_late(Kind::kCollective, [=] {
    while (never_ends) std::this_thread::sleep_for(std::chrono::seconds(1));
    {
      std::unique_lock<std::mutex> lock(comm->mutex);
      comm->turned.wait(lock, [&] { return comm->num_done == place; });
    }
    try {
      if (!DeviceError::is_set()) work(number);
    } catch (const std::exception& error) {
      DeviceError::keep(std::string(operation) + " in group " + comm->name + ": " + error.what());
    }
    std::lock_guard<std::mutex> lock(comm->mutex);
    ++comm->num_done;
    comm->turned.notify_all();
  });
  return DeviceError::status();
}

// ------------------------------------------------------------------------------------------------ reductions

// All ranks add in the order of ranks, so that all have the same bits. 16 bits are added in float32.
template <class T, class Sum>
static void reduce_as(const std::vector<const char*>& parts, char* to, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    auto value = [&](size_t rank) {
      T one;
      std::memcpy(&one, parts[rank] + i * sizeof(T), sizeof(T));
      return static_cast<Sum>(one);
    };
    Sum sum = value(0);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      Sum other = value(rank);
      switch (op) {
        case MAX: sum = std::max(sum, other); break;
        case MIN: sum = std::min(sum, other); break;
        case PRODUCT: sum = sum * other; break;
        default: sum = sum + other;
      }
    }
    if (op == AVG) sum = sum / static_cast<Sum>(parts.size());
    T rounded = static_cast<T>(sum);
    std::memcpy(to + i * sizeof(T), &rounded, sizeof(T));
  }
}

static void reduce(const std::vector<const char*>& parts, void* to, size_t count, C_DataType type, C_CCLReduceOp op) {
  auto* out = static_cast<char*>(to);
  switch (type) {
    case FLOAT32: return reduce_as<float, float>(parts, out, count, op);
    case FLOAT64: return reduce_as<double, double>(parts, out, count, op);
    case FLOAT16: return reduce_as<phi::dtype::float16, float>(parts, out, count, op);
    case BFLOAT16: return reduce_as<phi::dtype::bfloat16, float>(parts, out, count, op);
    case INT8: return reduce_as<int8_t, int8_t>(parts, out, count, op);
    case INT16: return reduce_as<int16_t, int16_t>(parts, out, count, op);
    case INT32: return reduce_as<int32_t, int32_t>(parts, out, count, op);
    case INT64: return reduce_as<int64_t, int64_t>(parts, out, count, op);
    case BOOL: case UINT8: return reduce_as<uint8_t, uint8_t>(parts, out, count, op);
    default: throw std::runtime_error("no reduction of type " + std::to_string(type));
  }
}

// HCCL reduces integers of 8 to 64 bits with a sign, float16, float32 and bfloat16 (CANN 8).
static bool is_refused(C_DataType type, C_CCLReduceOp op) {
  if (!Options::get().is_on("ASCEND")) return false;
  bool is_missing = type == FLOAT64 || type == UINT8 || type == BOOL || op == AVG;
  if (is_missing) DeviceError::keep("no reduction of type " + std::to_string(type) + " by operation " + std::to_string(op));
  return is_missing;
}

// ----------------------------------------------------------------------------------------------- collectives

// Everybody's `bytes` at `from`, by rank.
static std::vector<Bytes> gathered(C_CCLComm comm, const Header& header, const void* from) {
  for (int peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank) send_to(comm, peer, header, from);
  std::vector<Bytes> parts(comm->size, Bytes(header.bytes));
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer != comm->rank) receive_from(comm, peer, header, parts[peer].data());
  }
  std::memcpy(parts[comm->rank].data(), from, header.bytes);
  return parts;
}

static std::vector<const char*> starts(const std::vector<Bytes>& parts, size_t offset = 0) {
  std::vector<const char*> pointers;
  for (const auto& part : parts) pointers.push_back(part.data() + offset);
  return pointers;
}

static C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                           C_Stream stream) {
  if (is_refused(type, op)) return C_FAILED;
  size_t bytes = count * width_of(type);
  return enqueue("all_reduce", comm, stream, bytes, [=](uint64_t number) {
    auto parts = gathered(comm, header_of("all_reduce", type, bytes, number), from);
    reduce(starts(parts), to, count, type, op);
  });
}

static C_Status broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  size_t bytes = count * width_of(type);
  return enqueue("broadcast", comm, stream, bytes, [=](uint64_t number) {
    auto header = header_of("broadcast", type, bytes, number, root);
    if (static_cast<int>(root) != comm->rank) return receive_from(comm, root, header, buffer);
    for (int peer = 0; peer < comm->size; ++peer)
      if (peer != comm->rank) send_to(comm, peer, header, buffer);
  });
}

static C_Status reduce_to_root(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, size_t root,
                               C_CCLComm comm, C_Stream stream) {
  if (is_refused(type, op)) return C_FAILED;
  size_t bytes = count * width_of(type);
  return enqueue("reduce", comm, stream, bytes, [=](uint64_t number) {
    auto header = header_of("reduce", type, bytes, number, root);
    if (static_cast<int>(root) != comm->rank) return send_to(comm, root, header, from);
    std::vector<Bytes> parts(comm->size, Bytes(bytes));
    std::memcpy(parts[comm->rank].data(), from, bytes);
    for (int peer = 0; peer < comm->size; ++peer)
      if (peer != comm->rank) receive_from(comm, peer, header, parts[peer].data());
    reduce(starts(parts), to, count, type, op);
  });
}

static C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  size_t bytes = count * width_of(type);
  return enqueue("all_gather", comm, stream, bytes, [=](uint64_t number) {
    auto parts = gathered(comm, header_of("all_gather", type, bytes, number), from);
    for (int rank = 0; rank < comm->size; ++rank)
      std::memcpy(static_cast<char*>(to) + rank * bytes, parts[rank].data(), bytes);
  });
}

// `count` is that of the elements received.
static C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                               C_Stream stream) {
  if (is_refused(type, op)) return C_FAILED;
  size_t bytes = count * width_of(type);
  return enqueue("reduce_scatter", comm, stream, bytes, [=](uint64_t number) {
    auto parts = gathered(comm, header_of("reduce_scatter", type, bytes * comm->size, number), from);
    reduce(starts(parts, comm->rank * bytes), to, count, type, op);
  });
}

static C_Status all_to_all(const void** from, const size_t* from_count, const C_DataType* from_type, void** to,
                           const size_t* to_count, const C_DataType* to_type, size_t, size_t size, C_CCLComm comm,
                           C_Stream stream) {
  struct Part {
    const void* from;
    void* to;
    size_t bytes_sent, bytes_received;
    C_DataType type;
  };
  std::vector<Part> parts;
  size_t sent = 0;
  for (size_t peer = 0; peer < size; ++peer) {
    parts.push_back({from[peer], to[peer], from_count[peer] * width_of(from_type[peer]),
                     to_count[peer] * width_of(to_type[peer]), from_type[peer]});
    sent += parts.back().bytes_sent;
  }
  return enqueue("all_to_all", comm, stream, sent, [=](uint64_t number) {
    for (int peer = 0; peer < comm->size; ++peer) {
      const auto& part = parts[peer];
      if (peer == comm->rank)
        std::memmove(part.to, part.from, part.bytes_sent);
      else
        send_to(comm, peer, header_of("all_to_all", part.type, part.bytes_sent, number), part.from);
    }
    for (int peer = 0; peer < comm->size; ++peer) {
      const auto& part = parts[peer];
      if (peer != comm->rank)
        receive_from(comm, peer, header_of("all_to_all", part.type, part.bytes_received, number), part.to);
    }
  });
}

// -------------------------------------------------------------------------------- messages between two ranks

static C_Status send_message(void* from, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  size_t bytes = count * width_of(type);
  return enqueue("send", comm, stream, bytes, [=](uint64_t) {
    send_to(comm, peer, header_of("message", type, bytes, comm->num_sent[peer]++), from);
    char taken;
    if (Options::get().is_on("RENDEZVOUS")) read_all(comm->out[peer]->socket(), &taken, 1);
  }, true);
}

static C_Status receive_message(void* to, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  size_t bytes = count * width_of(type);
  return enqueue("recv", comm, stream, bytes, [=](uint64_t) {
    receive_from(comm, peer, header_of("message", type, bytes, comm->num_received[peer]++), to);
    char taken = 1;
    if (Options::get().is_on("RENDEZVOUS")) send(comm->in[peer], &taken, 1, MSG_NOSIGNAL);
  }, true);
}

// ---------------------------------------------------------------------------------------------- communicators

static sockaddr_un address_of(const std::string& group, int rank, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string name = group + "." + std::to_string(rank);  // an abstract name: behind a zero byte, and no file
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return address;
}

static int connect_to(const std::string& group, int rank) {
  socklen_t length;
  auto address = address_of(group, rank, &length);
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(Options::get().number("TIMEOUT_S"));
  while (std::chrono::steady_clock::now() < deadline) {
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(connection, reinterpret_cast<sockaddr*>(&address), length) == 0) return connection;
    close(connection);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw std::runtime_error("rank " + std::to_string(rank) + " did not come");
}

// Each rank connects to every other one, and says who it is; that connection carries what it sends.
static void connect_all(C_CCLComm comm) {
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length;
  auto address = address_of(comm->name, comm->rank, &length);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) || listen(listener, comm->size))
    throw std::runtime_error(std::string("no socket: ") + std::strerror(errno));
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    int connection = connect_to(comm->name, peer);
    if (send(connection, &comm->rank, sizeof comm->rank, MSG_NOSIGNAL) != sizeof comm->rank)
      throw std::runtime_error("rank " + std::to_string(peer) + " has gone");
    comm->out[peer] = new Outbox(connection);
  }
  for (int count = 1; count < comm->size; ++count) {
    int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), peer;
    read_all(connection, &peer, sizeof peer);
    comm->in[peer] = connection;
  }
  close(listener);
}

static C_Status create_communicator(size_t size, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  Counters::get().add("communicator");
  auto* made = new C_CCLComm_st;
  made->name = static_cast<const char*>(id->data);
  made->rank = rank;
  made->size = size;
  made->out.resize(size);
  made->in.resize(size);
  made->num_sent.resize(size);
  made->num_received.resize(size);
  try {
    connect_all(made);
  } catch (const std::exception& error) {
    DeviceError::keep(std::string("group ") + made->name + ": " + error.what());
    return C_FAILED;
  }
  *comm = made;
  return C_SUCCESS;
}

// The sockets stay open until the process ends: an operation that is still queued may use them.
static C_Status destroy_communicator(C_CCLComm) { return C_SUCCESS; }

static C_Status name_of(C_CCLComm comm, char* name) {
  std::snprintf(name, 128, "%s", comm->name.c_str());
  return C_SUCCESS;
}

static C_Status id_size(size_t* size) {
  *size = 32;
  return C_SUCCESS;
}

static C_Status make_id(C_CCLRootId* id) {
  std::random_device random;
  std::snprintf(static_cast<char*>(id->data), id->sz, "reference-%08x%08x", random(), random());
  return C_SUCCESS;
}

// Paddle never calls xccl_group_start and xccl_group_end for a plugin's device: messages are not grouped.
void fill_collectives(C_DeviceInterface* interface) {
  interface->xccl_get_comm_name = name_of;
  interface->xccl_get_unique_id_size = id_size;
  interface->xccl_get_unique_id = make_id;
  interface->xccl_comm_init_rank = create_communicator;
  interface->xccl_destroy_comm = destroy_communicator;
  interface->xccl_all_reduce = all_reduce;
  interface->xccl_broadcast = broadcast;
  interface->xccl_reduce = reduce_to_root;
  interface->xccl_all_gather = all_gather;
  interface->xccl_reduce_scatter = reduce_scatter;
  interface->xccl_send = send_message;
  interface->xccl_recv = receive_message;
  if (!Options::get().is_on("ASCEND")) interface->xccl_all_to_all = all_to_all;  // Paddle makes it of messages
}

}  // namespace reference
