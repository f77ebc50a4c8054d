#pragma once

/// The channel between a client and a worker, byte for byte. `docs/channel.md` is its prose.
///
/// Every packet is one `Header` and one body. Integers are little-endian, structs have no hidden
/// padding, text is UTF-8 without a terminator unless it lies in a fixed `char` array, which is
/// zero-filled. Reserved fields are sent as 0 and ignored, so that they can be given a meaning later.

#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace bulkhead::wire {

inline constexpr std::uint32_t magic = 0x3148'4B42;  // "BKH1" in memory
inline constexpr std::uint16_t version = 1;

inline constexpr std::size_t rank_max = 8;
inline constexpr std::size_t tensors_max = 32;
inline constexpr std::size_t name_bytes = 56;    ///< tensor name, terminator included
inline constexpr std::size_t method_bytes = 64;  ///< method and model name, terminator included
inline constexpr std::size_t json_bytes_max = 48 * 1024;
/// Every tensor starts at a multiple of this in its slab: a cache line, and what vector loads like.
inline constexpr std::uint64_t tensor_alignment = 64;

enum class MessageType : std::uint16_t {
    hello = 1,         ///< client → worker, first
    welcome = 2,       ///< worker → client, answers hello; `slab_offer`s follow
    slab_request = 3,  ///< client → worker: one more slab, of at least so many bytes
    slab_offer = 4,    ///< worker → client, one fd; answers slab_request or follows welcome
    infer = 5,         ///< client → worker
    cancel = 6,        ///< client → worker, request_id names the request
    result = 7,        ///< worker → client; with flag_more when further results follow
    error = 8,         ///< worker → client; request_id 0 concerns the whole channel
    release = 9,       ///< client → worker: gives output leases back
    closing = 10,      ///< worker → client: no new requests; what is in flight is still answered
    // where `rings` was agreed
    ring_offer = 11,  ///< worker → client, ring_offer_fds descriptors; right after welcome
    on_socket = 12,   ///< in a ring only: the next message of this direction comes on the socket
    // where `lending` was agreed
    slab_lend = 13,      ///< client → worker, one fd: another worker's output slab, to be read as input
    slab_accepted = 14,  ///< worker → client, answers slab_lend
    // where `returning` was agreed
    slab_withdraw = 15,  ///< worker → client: let go of this slab
    slab_return = 16,    ///< client → worker: has let go of this slab, and takes nothing more from it
    // where a CUDA kind was agreed
    event_offer = 17,  ///< worker → client: an interprocess event
};

inline constexpr std::uint32_t flag_more = 1;        ///< result: the request is not finished
inline constexpr std::uint32_t flag_retry_safe = 2;  ///< infer: may be run again on another worker

struct Header {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t type;        ///< MessageType
    std::uint32_t size_bytes;  ///< of the whole packet
    std::uint32_t flags;
    std::uint64_t request_id;  ///< chosen by the client, never 0 for a request, unique while in flight
    std::uint64_t reserved;
};

/// Bits of `features` in hello and welcome: what a side can speak; used is what both said.
enum Feature : std::uint64_t {
    feature_rings = 1,
    feature_cuda_vmm = 2,
    feature_cuda_ipc = 4,
    feature_streaming = 8,
    feature_lending = 16,
    feature_returning = 32,
};

using GpuUuid = std::array<std::uint8_t, 16>;  ///< as cuDeviceGetUuid gives it; all 0: none

struct Hello {
    std::uint16_t version_min;
    std::uint16_t version_max;
    std::uint32_t reserved0;
    std::uint64_t features;
    std::array<char, 48> client;  ///< for logs and receipts, such as "vad_timeline"
    GpuUuid gpu;                  ///< the client's; CUDA kinds are agreed only where it is the worker's
};

struct Welcome {
    std::uint16_t version;
    std::uint16_t slab_count;  ///< how many slab_offers follow
    std::uint32_t in_flight_max;
    std::uint64_t features;
    std::uint64_t generation;
    std::uint64_t channel;
    std::uint64_t slab_bytes_max;  ///< all slabs of this channel together
    std::uint32_t replica;
    std::uint32_t json_bytes;  ///< the methods' description follows this struct
    std::array<char, method_bytes> model;
};

enum class SlabDirection : std::uint16_t { input = 1, output = 2 };  ///< seen from the model
enum class SlabKind : std::uint16_t { host_memfd = 1, cuda_vmm = 2, cuda_ipc = 3 };

struct SlabRequest {
    std::uint16_t direction;
    std::uint16_t kind;
    std::uint32_t reserved0;
    std::uint64_t size_bytes;
    std::uint64_t reserved;
};

struct SlabOffer {
    std::uint32_t slab_id;  ///< unique in the channel
    std::uint16_t direction;
    std::uint16_t kind;
    std::uint64_t size_bytes;  ///< equals fstat's, where there is an fd
    std::array<std::uint64_t, 2> reserved;
};

/// A cudaIpcMemHandle_t or cudaIpcEventHandle_t. The former follows a SlabOffer of kind cuda_ipc, which has no fd.
using CudaIpcHandle = std::array<std::byte, 64>;

/// Descriptors: the rings' memfd, the doorbell that the client rings, the doorbell that the worker rings.
inline constexpr std::size_t ring_offer_fds = 3;
/// Geometry of the memfd: `ipc/ring/ring.h`.
struct RingOffer {
    std::uint32_t lines_to_worker;  ///< a power of two
    std::uint32_t lines_to_client;  ///< a power of two
    std::uint64_t size_bytes;       ///< equals fstat's
    std::uint64_t reserved;
};

/// Ids of lent slabs are the client's choice, at or above this; those of the worker's own slabs are below.
inline constexpr std::uint32_t lent_slab_id_min = 0x8000'0000;
struct SlabLend {
    std::uint32_t slab_id;
    std::uint16_t kind;
    std::uint16_t reserved0;
    std::uint64_t size_bytes;
    std::uint64_t reserved;
};

/// Body of slab_withdraw, slab_return and slab_accepted.
struct SlabName {
    std::uint32_t slab_id;
    std::uint32_t reserved;
};

/// Interprocess event of the worker's GPU. `from_worker`: the worker records it behind a result; else the client does,
/// behind its inputs.
struct EventOffer {
    std::uint32_t event_id;  ///< unique in the channel, not 0
    std::uint16_t from_worker;
    std::uint16_t reserved0;
    std::uint64_t reserved;
    CudaIpcHandle handle;
};

/// Values travel: append, never renumber.
enum class DType : std::uint8_t {
    boolean = 1,
    uint8 = 2,
    int8 = 3,
    int16 = 4,
    int32 = 5,
    int64 = 6,
    float16 = 7,
    bfloat16 = 8,
    float32 = 9,
    float64 = 10,
    complex64 = 11,
    complex128 = 12,
};

/// The right to some bytes of a slab, for a time. A generation is used once per slab: a lease that was
/// given back and comes again is stale, and refused.
struct LeaseRef {
    std::uint32_t slab_id;
    std::uint32_t event_id;  ///< in a release of GPU memory: let go once this event has passed; else 0
    std::uint64_t offset_bytes;
    std::uint64_t size_bytes;
    std::uint64_t generation;
};

struct TensorDescriptor {
    std::array<char, name_bytes> name;
    std::uint8_t dtype;
    std::uint8_t rank;
    std::uint16_t flags;
    std::uint32_t event_id;  ///< the bytes are there once this event has passed; 0: they are
    LeaseRef lease;
    std::array<std::int64_t, rank_max> dims;     ///< 0 beyond rank
    std::array<std::int64_t, rank_max> strides;  ///< in elements, 0 beyond rank; version 1: contiguous
};

/// Followed by `tensor_count` descriptors, then `json_bytes` of parameters (a JSON object).
struct Infer {
    std::array<char, method_bytes> method;
    std::uint32_t deadline_ms;  ///< from receipt; 0 means the model's own
    std::uint16_t tensor_count;
    std::uint16_t reserved0;
    std::uint32_t json_bytes;
    std::uint32_t reserved1;
};

/// Followed by `tensor_count` descriptors, then `json_bytes` (an object, may be empty).
struct InferResult {
    std::uint16_t tensor_count;
    std::uint16_t reserved0;
    std::uint32_t json_bytes;
    std::uint64_t queued_us;  ///< from receipt to start
    std::uint64_t run_us;     ///< in the model
    std::uint64_t reserved;
};

/// Followed by `attempt_bytes`, then `remedy_bytes` of text.
struct ErrorBody {
    std::uint16_t code;  ///< ErrorCode
    std::uint16_t reserved;
    std::uint32_t attempt_bytes;
    std::uint32_t remedy_bytes;
    std::uint32_t reserved1;
};

/// Followed by `count` LeaseRefs.
struct Release {
    std::uint32_t count;
    std::uint32_t reserved;
};

struct Closing {
    std::uint16_t code;  ///< ErrorCode that new requests will get, such as worker_draining
    std::uint16_t reserved0;
    std::uint32_t deadline_ms;
};

template <typename T, std::size_t size>
inline constexpr bool is_wire_struct = std::is_trivially_copyable_v<T>&& std::is_standard_layout_v<T>&&
                                           std::has_unique_object_representations_v<T> &&
                                       sizeof(T) == size;

static_assert(is_wire_struct<Header, 32>);
static_assert(is_wire_struct<Hello, 80>);
static_assert(is_wire_struct<Welcome, 112>);
static_assert(is_wire_struct<SlabRequest, 24>);
static_assert(is_wire_struct<SlabOffer, 32>);
static_assert(is_wire_struct<RingOffer, 24>);
static_assert(is_wire_struct<SlabLend, 24>);
static_assert(is_wire_struct<SlabName, 8>);
static_assert(is_wire_struct<EventOffer, 80>);
static_assert(is_wire_struct<LeaseRef, 32>);
static_assert(is_wire_struct<TensorDescriptor, 224>);
static_assert(is_wire_struct<Infer, 80>);
static_assert(is_wire_struct<InferResult, 32>);
static_assert(is_wire_struct<ErrorBody, 16>);
static_assert(is_wire_struct<Release, 8>);
static_assert(is_wire_struct<Closing, 8>);

}  // namespace bulkhead::wire
