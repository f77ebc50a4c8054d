// wire.json is what clients in other languages are written from: it and ipc/wire.h must be the same, member by member.

#include "ipc/wire.h"

#include <cstddef>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include <boost/json.hpp>
#include <gtest/gtest.h>

#include "ipc/error.h"
#include "ipc/packet.h"
#include "ipc/ring.h"

namespace bulkhead::wire {
namespace {

namespace json = boost::json;

struct Member {
    std::size_t offset;
    std::size_t size;
};
using Members = std::map<std::string, Member>;

#define MEMBER(type, name)                                                                                             \
    {                                                                                                                  \
#name, { offsetof(type, name), sizeof(type::name) }                                                            \
    }

const std::map<std::string, std::pair<std::size_t, Members>> structs{
    {"Header",
     {sizeof(Header),
      {MEMBER(Header, magic), MEMBER(Header, version), MEMBER(Header, type), MEMBER(Header, size_bytes),
       MEMBER(Header, flags), MEMBER(Header, request_id), MEMBER(Header, reserved)}}},
    {"Hello",
     {sizeof(Hello),
      {MEMBER(Hello, version_min), MEMBER(Hello, version_max), MEMBER(Hello, reserved0), MEMBER(Hello, features),
       MEMBER(Hello, client), MEMBER(Hello, gpu)}}},
    {"Welcome",
     {sizeof(Welcome),
      {MEMBER(Welcome, version), MEMBER(Welcome, slab_count), MEMBER(Welcome, in_flight_max), MEMBER(Welcome, features),
       MEMBER(Welcome, generation), MEMBER(Welcome, channel), MEMBER(Welcome, slab_bytes_max), MEMBER(Welcome, replica),
       MEMBER(Welcome, json_bytes), MEMBER(Welcome, model)}}},
    {"SlabRequest",
     {sizeof(SlabRequest),
      {MEMBER(SlabRequest, direction), MEMBER(SlabRequest, kind), MEMBER(SlabRequest, reserved0),
       MEMBER(SlabRequest, size_bytes), MEMBER(SlabRequest, reserved)}}},
    {"SlabOffer",
     {sizeof(SlabOffer),
      {MEMBER(SlabOffer, slab_id), MEMBER(SlabOffer, direction), MEMBER(SlabOffer, kind), MEMBER(SlabOffer, size_bytes),
       MEMBER(SlabOffer, reserved)}}},
    {"RingOffer",
     {sizeof(RingOffer),
      {MEMBER(RingOffer, lines_to_worker), MEMBER(RingOffer, lines_to_client), MEMBER(RingOffer, size_bytes),
       MEMBER(RingOffer, reserved)}}},
    {"SlabLend",
     {sizeof(SlabLend),
      {MEMBER(SlabLend, slab_id), MEMBER(SlabLend, kind), MEMBER(SlabLend, reserved0), MEMBER(SlabLend, size_bytes),
       MEMBER(SlabLend, reserved)}}},
    {"SlabName", {sizeof(SlabName), {MEMBER(SlabName, slab_id), MEMBER(SlabName, reserved)}}},
    {"EventOffer",
     {sizeof(EventOffer),
      {MEMBER(EventOffer, event_id), MEMBER(EventOffer, from_worker), MEMBER(EventOffer, reserved0),
       MEMBER(EventOffer, reserved), MEMBER(EventOffer, handle)}}},
    {"LeaseRef",
     {sizeof(LeaseRef),
      {MEMBER(LeaseRef, slab_id), MEMBER(LeaseRef, event_id), MEMBER(LeaseRef, offset_bytes),
       MEMBER(LeaseRef, size_bytes), MEMBER(LeaseRef, generation)}}},
    {"TensorDescriptor",
     {sizeof(TensorDescriptor),
      {MEMBER(TensorDescriptor, name), MEMBER(TensorDescriptor, dtype), MEMBER(TensorDescriptor, rank),
       MEMBER(TensorDescriptor, flags), MEMBER(TensorDescriptor, event_id), MEMBER(TensorDescriptor, lease),
       MEMBER(TensorDescriptor, dims), MEMBER(TensorDescriptor, strides)}}},
    {"Infer",
     {sizeof(Infer),
      {MEMBER(Infer, method), MEMBER(Infer, deadline_ms), MEMBER(Infer, tensor_count), MEMBER(Infer, reserved0),
       MEMBER(Infer, json_bytes), MEMBER(Infer, reserved1)}}},
    {"InferResult",
     {sizeof(InferResult),
      {MEMBER(InferResult, tensor_count), MEMBER(InferResult, reserved0), MEMBER(InferResult, json_bytes),
       MEMBER(InferResult, queued_us), MEMBER(InferResult, run_us), MEMBER(InferResult, reserved)}}},
    {"ErrorBody",
     {sizeof(ErrorBody),
      {MEMBER(ErrorBody, code), MEMBER(ErrorBody, reserved), MEMBER(ErrorBody, attempt_bytes),
       MEMBER(ErrorBody, remedy_bytes), MEMBER(ErrorBody, reserved1)}}},
    {"Release", {sizeof(Release), {MEMBER(Release, count), MEMBER(Release, reserved)}}},
    {"Closing", {sizeof(Closing), {MEMBER(Closing, code), MEMBER(Closing, reserved0), MEMBER(Closing, deadline_ms)}}},
};

std::size_t size_of(const std::string& type) {
    const std::size_t bracket = type.find('[');
    const std::string base = type.substr(0, bracket);
    const std::size_t count = bracket == std::string::npos ? 1 : std::stoul(type.substr(bracket + 1));
    static const std::map<std::string, std::size_t> sizes{
        {"u8", 1}, {"u16", 2}, {"u32", 4}, {"u64", 8}, {"i64", 8}, {"char", 1}, {"LeaseRef", sizeof(LeaseRef)}};
    return sizes.at(base) * count;
}

class WireJson : public ::testing::Test {
protected:
    static json::object read() {
        std::ifstream file{BULKHEAD_SOURCE_DIR "/ipc/wire.json"};
        return json::parse(std::string{std::istreambuf_iterator<char>{file}, {}}).as_object();
    }
    const json::object spec = read();
    std::int64_t enumerator(const char* name, const char* member) const {
        return spec.at("enums").at(name).at(member).as_int64();
    }
};

TEST_F(WireJson, HasEveryStructWithEveryMemberWhereItIs) {
    const json::object& described = spec.at("structs").as_object();
    EXPECT_EQ(described.size(), structs.size());
    for (const auto& [name, real] : structs) {
        SCOPED_TRACE(name);
        ASSERT_TRUE(described.contains(name));
        EXPECT_EQ(described.at(name).at("size").as_int64(), static_cast<std::int64_t>(real.first));
        std::size_t offset = 0;
        const json::array& fields = described.at(name).at("fields").as_array();
        EXPECT_EQ(fields.size(), real.second.size());
        for (const json::value& field : fields) {
            const std::string member{field.at(0).as_string()};
            const std::size_t size = size_of(std::string{field.at(1).as_string()});
            SCOPED_TRACE(member);
            ASSERT_TRUE(real.second.contains(member));
            EXPECT_EQ(real.second.at(member).offset, offset);
            EXPECT_EQ(real.second.at(member).size, size);
            offset += size;
        }
        EXPECT_EQ(offset, real.first) << "hidden padding";
    }
}

TEST_F(WireJson, HasTheNumbersOfTheHeader) {
    EXPECT_EQ(spec.at("magic").as_int64(), magic);
    EXPECT_EQ(spec.at("version").as_int64(), version);
    const json::object& limits = spec.at("limits").as_object();
    EXPECT_EQ(limits.at("rank_max").as_int64(), rank_max);
    EXPECT_EQ(limits.at("tensors_max").as_int64(), tensors_max);
    EXPECT_EQ(limits.at("json_bytes_max").as_int64(), json_bytes_max);
    EXPECT_EQ(limits.at("tensor_alignment").as_int64(), tensor_alignment);
    EXPECT_EQ(limits.at("packet_bytes_max").as_int64(), packet_bytes_max);
    EXPECT_EQ(limits.at("lent_slab_id_min").as_int64(), lent_slab_id_min);
    EXPECT_EQ(limits.at("ring_offer_fds").as_int64(), ring_offer_fds);
    EXPECT_EQ(limits.at("ring_lines_min").as_int64(), ring::lines_min);
    EXPECT_EQ(limits.at("ring_lines_max").as_int64(), ring::lines_max);
    EXPECT_EQ(limits.at("ipc_handle_bytes").as_int64(), sizeof(CudaIpcHandle));
}

TEST_F(WireJson, HasTheRingsMemory) {
    const json::object& rings = spec.at("rings").as_object();
    EXPECT_EQ(rings.at("header_bytes").as_int64(), ring::header_bytes);
    EXPECT_EQ(rings.at("line_bytes").as_int64(), sizeof(ring::Line));
    EXPECT_EQ(rings.at("payload_bytes").as_int64(), ring::payload_bytes);
    EXPECT_EQ(rings.at("asleep").at("packets").as_int64(), ring::wants_packets);
    EXPECT_EQ(rings.at("asleep").at("room").as_int64(), ring::wants_room);
    EXPECT_EQ(rings.at("asleep").at("left").as_int64(), ring::has_left);
    using ring::Header;
    using ring::Side;
    const Members real{
        {"worker asleep", {offsetof(Header, worker) + offsetof(Side, asleep), sizeof(Side::asleep)}},
        {"worker reserved", {offsetof(Header, worker) + offsetof(Side, reserved), sizeof(Side::reserved)}},
        {"client asleep", {offsetof(Header, client) + offsetof(Side, asleep), sizeof(Side::asleep)}},
        {"client reserved", {offsetof(Header, client) + offsetof(Side, reserved), sizeof(Side::reserved)}},
        {"lines read by the worker", {offsetof(Header, of_worker), sizeof(ring::Progress::lines)}},
        {"lines read by the client", {offsetof(Header, of_client), sizeof(ring::Progress::lines)}}};
    const json::array& fields = rings.at("fields").as_array();
    EXPECT_EQ(fields.size(), real.size());
    for (const json::value& field : fields) {
        const std::string name{field.at(0).as_string()};
        SCOPED_TRACE(name);
        ASSERT_TRUE(real.contains(name));
        EXPECT_EQ(real.at(name).size, size_of(std::string{field.at(1).as_string()}));
        EXPECT_EQ(static_cast<std::int64_t>(real.at(name).offset), field.at(2).as_int64());
    }
}

TEST_F(WireJson, HasTheEnumerators) {
    EXPECT_EQ(enumerator("MessageType", "hello"), static_cast<int>(MessageType::hello));
    EXPECT_EQ(enumerator("MessageType", "closing"), static_cast<int>(MessageType::closing));
    EXPECT_EQ(enumerator("MessageType", "event_offer"), static_cast<int>(MessageType::event_offer));
    EXPECT_EQ(spec.at("enums").at("MessageType").as_object().size(), 17U);
    EXPECT_EQ(enumerator("DType", "boolean"), static_cast<int>(DType::boolean));
    EXPECT_EQ(enumerator("DType", "bfloat16"), static_cast<int>(DType::bfloat16));
    EXPECT_EQ(enumerator("DType", "complex128"), static_cast<int>(DType::complex128));
    EXPECT_EQ(spec.at("enums").at("DType").as_object().size(), 12U);
    EXPECT_EQ(enumerator("SlabDirection", "output"), static_cast<int>(SlabDirection::output));
    EXPECT_EQ(enumerator("SlabKind", "cuda_ipc"), static_cast<int>(SlabKind::cuda_ipc));
    EXPECT_EQ(enumerator("Flag", "more"), static_cast<std::int64_t>(flag_more));
    EXPECT_EQ(enumerator("Flag", "retry_safe"), static_cast<std::int64_t>(flag_retry_safe));
    EXPECT_EQ(enumerator("Feature", "rings"), feature_rings);
    EXPECT_EQ(enumerator("Feature", "cuda_vmm"), feature_cuda_vmm);
    EXPECT_EQ(enumerator("Feature", "cuda_ipc"), feature_cuda_ipc);
    EXPECT_EQ(enumerator("Feature", "streaming"), feature_streaming);
    EXPECT_EQ(enumerator("Feature", "lending"), feature_lending);
    EXPECT_EQ(enumerator("Feature", "returning"), feature_returning);
}

TEST_F(WireJson, HasEveryErrorCode) {
    const json::object& codes = spec.at("enums").at("ErrorCode").as_object();
    for (const auto& [name, number] : codes) {
        const auto code = error_code_from(static_cast<std::uint16_t>(number.as_int64()));
        ASSERT_TRUE(code) << std::string{name};
        EXPECT_EQ(to_string(*code), std::string_view{name});
    }
    EXPECT_FALSE(error_code_from(static_cast<std::uint16_t>(codes.size() + 1))) << "a code that wire.json lacks";
}

}  // namespace
}  // namespace bulkhead::wire
