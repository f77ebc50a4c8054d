// A worker and its clients over real sockets: leases, sends, frees, wrong frees, cancels and deaths
// of either side, in random order. What must hold is kept beside it in the plainest way: who holds
// which bytes, and what is written there.

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "ipc/slab/slab_allocator.h"
#include "tests/support/mappings.h"
#include "tests/support/open_descriptors.h"
#include "tests/support/property.h"
#include "tests/support/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

constexpr std::uint64_t slab_bytes = 64 * 1024;
constexpr std::size_t values_max = 6'000;  ///< of one tensor: three of the largest fill a slab
constexpr std::size_t clients_max = 3;
constexpr std::size_t in_flight_max = 6;

/// From its start to its death.
class WorkerLife : public LoopTest {
public:
    WorkerLife() {
        spec.channel = {
            .input_bytes = slab_bytes, .output_bytes = slab_bytes, .bytes_max = 2 * slab_bytes, .channels_max = 8};
        start_ready();
    }
    void TestBody() override {}
    using LoopTest::expect_said;
    using LoopTest::link;
    using LoopTest::log;
    using LoopTest::open_channel;

    /// What the worker tells its supervisor is of no interest here, and must not fill the socket.
    void pass_over_link() {
        Packet packet;
        std::vector<std::byte> buffer(packet_bytes_max);
        while (readable_within(link.get(), 0ms) &&
               receive_packet(link.get(), buffer, packet, 0, packet_fds_kernel_max).value() == ReceiveOutcome::packet) {
        }
    }
};

/// One client, and what it may believe.
struct Player {
    explicit Player(TestClient&& opened) : client{std::move(opened)} {}

    struct Sent {
        SlabAllocator::Block input;
        float mark;
        std::size_t count;
        bool waits;  ///< at the gate, until somebody is to be answered
        /// The longest free range of the output slab when it was sent, where nothing else could lie
        /// in there: what is given back later may come too late for it.
        std::optional<std::uint64_t> room;
        bool cancelled = false;
    };
    struct Held {
        wire::LeaseRef lease;
        channel::Tensor tensor;
        float mark;
    };
    TestClient client;
    SlabAllocator inputs{slab_bytes};
    std::map<std::uint64_t, Sent> in_flight;
    std::vector<Held> held;
    std::deque<wire::LeaseRef> gone;
    std::set<std::uint64_t> lease_ids;  ///< of the output slab, ever seen
    std::uint32_t violations = 0;       ///< that the worker has counted, or will
    std::uint32_t violations_untold = 0;
    bool result_thrown_away = false;  ///< a cancelled request's, and perhaps it still lies in
                                      ///< the output slab
};

class ChannelWalk {
public:
    ChannelWalk() : life_{std::make_unique<WorkerLife>()} {}

    void step() {
        life_->pass_over_link();
        if (walk.one_in(400)) return worker_dies();
        if (players_.empty() || (players_.size() < clients_max && walk.one_in(20))) return client_comes();
        Player& player = *players_[walk.below(players_.size())];
        switch (walk.below(16)) {
        case 0: return walk.one_in(6) ? client_dies(player) : read(player);
        case 1: return give_back_wrongly(player);
        case 2: return cancel(player);
        case 3: return fill_the_slab(player);
        case 4:
        case 5: return read(player);
        case 6:
        case 7:
        case 8: return give_back(player);
        case 9:
        case 10:
        case 11: return receive(player);
        default: return send(player);
        }
    }
    /// Everybody leaves; nothing of anybody is left.
    void end() {
        while (!players_.empty() && !testing::Test::HasFatalFailure()) client_dies(*players_.back());
        life_.reset();
    }
    bulkhead::test::RandomWalk walk;

private:
    using PlayerList = std::vector<std::unique_ptr<Player>>;

    void client_comes() {
        players_.push_back(std::make_unique<Player>(life_->open_channel()));
        ASSERT_TRUE(players_.back()->client.find_slab(wire::SlabDirection::output) != nullptr);
    }

    void send(Player& player) {
        if (player.in_flight.size() >= in_flight_max) return;
        const std::size_t count = 1 + walk.below(walk.one_in(4) ? values_max : 64);
        const auto input = player.inputs.allocate(count * sizeof(float));
        if (!input) return;
        const auto mark = static_cast<float>(++marks_ % (1 << 24));
        const bool waits = walk.one_in(3);
        std::optional<std::uint64_t> room;
        if (player.in_flight.empty() && !player.result_thrown_away) room = longest_gap(player);
        player.client.infer(
            ++last_request_, waits ? "wait" : "echo",
            {player.client.tensor(std::vector<float>(count, mark), input->offset_bytes, input->lease_id)});
        player.in_flight[last_request_] = {*input, mark, count, waits, room};
    }

    /// The whole output slab, by a client that holds none of it: nothing was lost so far.
    void fill_the_slab(Player& player) {
        if (!player.held.empty() || !player.in_flight.empty() || player.result_thrown_away) return;
        player.client.infer(++last_request_, "fill", {}, {{"bytes", slab_bytes}});
        open_the_gate();
        std::optional<channel::WorkerMessage> message;
        do {
            message = player.client.receive_answer();
            ASSERT_TRUE(message);
        } while (took_violation(player, *message));
        ASSERT_TRUE(std::holds_alternative<channel::InferResult>(*message)) << "bytes of the output slab were lost";
        const wire::LeaseRef lease = std::get<channel::InferResult>(*message).tensors.at(0).lease;
        expect_new(player, lease);
        player.client.send(channel::encode(channel::Release{{lease}}));
    }

    void cancel(Player& player) {
        if (player.in_flight.empty()) return;
        auto request = player.in_flight.begin();
        std::advance(request, walk.below(player.in_flight.size()));
        player.client.send(channel::encode(channel::Cancel{request->first}));
        request->second.cancelled = true;
    }

    void receive(Player& player) {
        if (player.in_flight.empty() && player.violations_untold == 0) return;
        open_the_gate();
        const auto message = player.client.receive_answer();
        ASSERT_TRUE(message) << "the worker has closed the channel";
        take(player, *message);
    }

    void take(Player& player, const channel::WorkerMessage& message) {
        if (took_violation(player, message)) return;
        if (const auto* failure = std::get_if<channel::Failure>(&message)) {
            const auto request = player.in_flight.find(failure->request_id);
            ASSERT_NE(request, player.in_flight.end()) << failure->error.text();
            if (failure->error.code == ErrorCode::cancelled) {
                ASSERT_TRUE(request->second.cancelled);
                player.result_thrown_away = true;
            } else {
                ASSERT_EQ(to_string(failure->error.code), to_string(ErrorCode::resources_exhausted))
                    << failure->error.text();
                if (request->second.room) {
                    ASSERT_LT(*request->second.room, request->second.count * sizeof(float)) << "there was room";
                }
            }
            return forget(player, request);
        }
        ASSERT_TRUE(std::holds_alternative<channel::InferResult>(message));
        const auto& result = std::get<channel::InferResult>(message);
        const auto request = player.in_flight.find(result.request_id);
        ASSERT_NE(request, player.in_flight.end()) << "answered twice";
        ASSERT_EQ(result.tensors.size(), 1U);
        expect_new(player, result.tensors[0].lease);
        ASSERT_EQ(result.tensors[0].lease.size_bytes, request->second.count * sizeof(float));
        player.held.push_back({result.tensors[0].lease, result.tensors[0], request->second.mark});
        expect_marked(player, player.held.back());
        player.result_thrown_away = false;  // one after the other: what was cancelled
                                            // before it has ended
        forget(player, request);
    }
    /// True for the answer to a wrong release.
    static bool took_violation(Player& player, const channel::WorkerMessage& message) {
        const auto* failure = std::get_if<channel::Failure>(&message);
        if (failure == nullptr || failure->request_id != 0) return false;
        EXPECT_EQ(to_string(failure->error.code), to_string(ErrorCode::protocol_violation)) << failure->error.text();
        EXPECT_GT(player.violations_untold, 0U) << failure->error.text();
        --player.violations_untold;
        return true;
    }
    static void forget(Player& player, std::map<std::uint64_t, Player::Sent>::iterator request) {
        ASSERT_TRUE(player.inputs.release(request->second.input));
        player.in_flight.erase(request);
    }

    void read(Player& player) {
        if (!player.held.empty()) expect_marked(player, player.held[walk.below(player.held.size())]);
    }
    void give_back(Player& player) {
        if (player.held.empty()) return;
        std::swap(player.held[walk.below(player.held.size())], player.held.back());
        expect_marked(player, player.held.back());
        player.gone.push_back(player.held.back().lease);
        if (player.gone.size() > 32) player.gone.pop_front();
        player.held.pop_back();
        player.client.send(channel::encode(channel::Release{{player.gone.back()}}));
    }
    void give_back_wrongly(Player& player) {
        // One more ends the channel, rightly.
        if (player.violations + 1 >= limits::violations_max) return;
        wire::LeaseRef lease{};
        if (!player.gone.empty() && walk.one_in(2)) {
            lease = player.gone[walk.below(player.gone.size())];
        } else if (!player.held.empty()) {
            lease = player.held[walk.below(player.held.size())].lease;
            std::uint64_t& field = *std::array{&lease.offset_bytes, &lease.size_bytes, &lease.lease_id}[walk.below(3)];
            field += wire::tensor_alignment << walk.below(20);
        } else {
            return;
        }
        player.client.send(channel::encode(channel::Release{{lease}}));
        ++player.violations;
        ++player.violations_untold;
    }

    void client_dies(Player& player) {
        const std::uint64_t id = player.client.id;
        open_the_gate();
        player.client.close();
        ASSERT_EQ(number(life_->expect_said("channel_closed"), "channel"), id);
        std::erase_if(players_, [&](const auto& one) { return one.get() == &player; });
        if (!players_.empty()) return;
        const std::lock_guard lock{life_->log->mutex};
        ASSERT_EQ(life_->log->registered, life_->log->unregistered) << "slabs that no client has";
        ASSERT_EQ(slabs_mapped(), 0U);
    }
    /// What was sent can still be read, what is held stays as it was, and a client comes to
    /// the next worker.
    void worker_dies() {
        life_.reset();
        for (const auto& player : players_) {
            for (const Player::Held& one : player->held) expect_marked(*player, one);
            while (const auto message = player->client.receive_answer()) {
                take(*player, *message);
                if (testing::Test::HasFatalFailure()) return;
            }
            for (const Player::Held& one : player->held) expect_marked(*player, one);
        }
        players_.clear();
        ASSERT_EQ(slabs_mapped(), 0U);
        life_ = std::make_unique<WorkerLife>();
        if (descriptors_ == 0) descriptors_ = bulkhead::test::open_descriptors();
        ASSERT_EQ(bulkhead::test::open_descriptors(), descriptors_);
    }

    /// As many may pass as could be waiting; passes that are left over let later ones through.
    void open_the_gate() {
        for (const auto& player : players_)
            for (const auto& [id, sent] : player->in_flight)
                if (sent.waits) life_->log->gate.let_one_pass();
    }
    void expect_new(Player& player, const wire::LeaseRef& lease) {
        ASSERT_EQ(lease.offset_bytes % wire::tensor_alignment, 0U);
        ASSERT_LE(lease.offset_bytes + lease.size_bytes, slab_bytes);
        ASSERT_TRUE(player.lease_ids.insert(lease.lease_id).second) << "a lease id was used again";
        for (const Player::Held& one : player.held)
            ASSERT_TRUE(one.lease.offset_bytes + one.lease.size_bytes <= lease.offset_bytes ||
                        lease.offset_bytes + lease.size_bytes <= one.lease.offset_bytes)
                << "bytes that this client still holds";
    }
    static void expect_marked(const Player& player, const Player::Held& one) {
        const std::vector<float> values = player.client.values(one.tensor);
        ASSERT_TRUE(std::ranges::all_of(values, [&](float value) { return value == one.mark; }))
            << "written under its reader";
    }
    static std::uint64_t longest_gap(const Player& player) {
        std::map<std::uint64_t, std::uint64_t> taken;
        for (const Player::Held& one : player.held)
            taken[one.lease.offset_bytes] =
                (std::max<std::uint64_t>(1, one.lease.size_bytes) + wire::tensor_alignment - 1) /
                wire::tensor_alignment * wire::tensor_alignment;
        std::uint64_t longest = 0, at = 0;
        for (const auto& [offset, size] : taken) {
            longest = std::max(longest, offset - at);
            at = offset + size;
        }
        return std::max(longest, slab_bytes - at);
    }
    static std::size_t slabs_mapped() { return bulkhead::test::mappings("/memfd:bulkhead:"); }

    std::unique_ptr<WorkerLife> life_;
    PlayerList players_;
    std::uint64_t last_request_ = 0;
    std::uint64_t marks_ = 0;
    std::size_t descriptors_ = 0;  ///< of this process while a worker lives that has no client
};

TEST(ChannelLeaseProperty, NoByteIsLostGivenTwiceOrReadStaleWhoeverDies) {
    ChannelWalk channels;
    for (std::uint64_t i = 0; i < channels.walk.steps && !testing::Test::HasFatalFailure(); ++i) {
        SCOPED_TRACE(i);
        channels.step();
    }
    channels.end();
}

}  // namespace
}  // namespace bulkhead::worker::test
