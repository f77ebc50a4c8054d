#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "worker/cuda/generation_kernels.h"
#include "worker/generation/host_sampler.h"
#include "worker/generation/slot_start.h"

namespace bulkhead::worker::cuda {
namespace {

using generation::limits::forced_steps_max;

#define CHECK_CUDA(call) ASSERT_EQ(call, cudaSuccess)

/// Memory of the host that both sides read and write; freed with the object.
template <typename T>
class Shared {
public:
    explicit Shared(std::size_t count) : count_{count} {
        void* bytes = nullptr;
        if (cudaHostAlloc(&bytes, count * sizeof(T), cudaHostAllocMapped) != cudaSuccess)
            throw std::runtime_error{"cudaHostAlloc"};
        values_ = static_cast<T*>(bytes);
        std::memset(bytes, 0, count * sizeof(T));
    }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    ~Shared() { cudaFreeHost(values_); }
    T* data() { return values_; }
    T& operator[](std::size_t i) { return values_[i]; }
    std::size_t size() const { return count_; }

private:
    std::size_t count_;
    T* values_ = nullptr;
};

/// Device memory that the blocks of a row share, with what lay there before; freed with the object.
class DeviceRows {
public:
    explicit DeviceRows(std::size_t count) {
        void* bytes = nullptr;
        if (cudaMalloc(&bytes, count * sizeof(RowScratch)) != cudaSuccess) throw std::runtime_error{"cudaMalloc"};
        rows_ = static_cast<RowScratch*>(bytes);
        if (cudaMemset(bytes, 0xa5, count * sizeof(RowScratch)) != cudaSuccess) throw std::runtime_error{"cudaMemset"};
    }
    DeviceRows(const DeviceRows&) = delete;
    DeviceRows& operator=(const DeviceRows&) = delete;
    ~DeviceRows() { cudaFree(rows_); }
    RowScratch* data() { return rows_; }

private:
    RowScratch* rows_ = nullptr;
};

/// The same sequences on the GPU and on the host.
struct Both {
    Both(const DrawRules& its_rules, std::uint32_t count)
        : rules{its_rules}, slots{count}, rows{std::size_t{count} * (rules.guided ? 2 : 1)},
          states(count), flags(std::size_t{count} * rules.codebooks * rules.vocabulary),
          forced(std::size_t{count} * forced_steps_max * rules.codebooks), adjusted(flags.size()),
          row_scratch(std::size_t{count} * rules.codebooks), row_blocks(row_blocks_here(rules.vocabulary)),
          drawn(std::size_t{count} * rules.codebooks), tokens(drawn.size()), positions(count), deltas(count), turn(1),
          active(1), given(std::size_t{given_turns} * count), logits(rows * rules.codebooks * rules.vocabulary),
          host(count), sampler{rules} {
        active[0] = count;
    }

    DeviceSlots view() {
        return {states.data(),    flags.data(),  forced.data(), adjusted.data(), row_scratch.data(), drawn.data(),
                tokens.data(),    positions.data(), deltas.data(), turn.data(),  active.data(),      given.data(),
                slots,            1024,          row_blocks,    rules};
    }
    void begin(std::uint32_t slot, const generation::Start& start) {
        host[slot] = generation::start_slot(rules, start).value();
        states[slot] = host[slot].state;
        const std::size_t table = std::size_t{rules.codebooks} * rules.vocabulary;
        std::ranges::copy(host[slot].flags, flags.data() + slot * table);
        std::ranges::copy(host[slot].forced, forced.data() + std::size_t{slot} * forced_steps_max * rules.codebooks);
    }
    /// One step of all on both sides: equal in every token, stop and state.
    void step(std::mt19937& random, float spread) {
        for (std::size_t i = 0; i < logits.size(); ++i)
            logits[i] = std::normal_distribution<float>{0, spread}(random);
        const std::uint32_t before = turn[0];
        stage_inputs(view(), slots, nullptr);
        draw_and_advance(view(), logits.data(), 0, slots, true, nullptr);
        CHECK_CUDA(cudaDeviceSynchronize());
        ASSERT_EQ(turn[0], before + 1);
        const std::size_t row = rows / slots * rules.codebooks * rules.vocabulary;
        for (std::uint32_t slot = 0; slot < slots; ++slot) {
            generation::SlotStart& own = host[slot];
            ASSERT_EQ(positions[slot], own.state.position);
            std::vector<std::int32_t> expected(rules.codebooks);
            if (!own.state.stopped) {
                const auto choice =
                    sampler.draw(logits.data() + slot * row, own.flags.data(), own.forced.data(), own.state);
                advance(own.state, rules, choice.data(), own.forced.data(), own.flags.data(), true, expected.data());
            } else {
                advance(own.state, rules, nullptr, nullptr, nullptr, true, expected.data());
            }
            const GivenStep& result = given[before % given_turns * slots + slot];
            for (std::uint32_t c = 0; c < rules.codebooks; ++c) ASSERT_EQ(result.tokens[c], expected[c]) << "slot " << slot;
            ASSERT_EQ(result.stop != 0, own.state.stopped);
            ASSERT_EQ(states[slot].position, own.state.position);
            ASSERT_EQ(states[slot].step, own.state.step);
            ASSERT_EQ(std::memcmp(states[slot].input, own.state.input, sizeof own.state.input), 0);
        }
    }

    DrawRules rules;
    std::uint32_t slots;
    std::size_t rows;
    Shared<SlotState> states;
    Shared<std::uint8_t> flags;
    Shared<std::int32_t> forced;
    Shared<float> adjusted;
    DeviceRows row_scratch;
    std::uint32_t row_blocks;
    Shared<Drawn> drawn;
    Shared<std::int64_t> tokens;
    Shared<std::int64_t> positions;
    Shared<std::int64_t> deltas;
    Shared<std::uint32_t> turn;
    Shared<std::uint32_t> active;
    Shared<GivenStep> given;
    Shared<float> logits;
    std::vector<generation::SlotStart> host;
    generation::HostSampler sampler;
};

class SamplerKernel : public testing::Test {
protected:
    void SetUp() override {
        int count = 0;
        if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
            (void)cudaGetLastError();
            GTEST_SKIP() << "no GPU: " << cudaGetErrorString(error);
        }
    }
    generation::Start start_with(bool sample) {
        generation::Start start;
        start.sampling.do_sample = sample;
        start.sampling.seed = random_();
        start.sampling.temperature = std::uniform_real_distribution<float>{0.5F, 1.5F}(random_);
        start.sampling.top_k = random_() % 2 == 0 ? 0 : 50;
        start.sampling.top_p = random_() % 2 == 0 ? 1 : 0.9F;
        start.sampling.min_p = random_() % 2 == 0 ? 0 : 0.02F;
        start.sampling.repetition_penalty = 1.2F;
        start.sampling.guidance = 0.5F;
        start.rules.banned = {0, 1};
        start.rules.stop = {2};
        return start;
    }
    std::mt19937 random_{20'261'122};
};

TEST_F(SamplerKernel, AGpuWithClustersHoldsThoseOfTheLongestRow) {
    int major = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    EXPECT_EQ(row_blocks_here(generation::limits::vocabulary_max), major >= 9 ? row_blocks_max : 1);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "what was tried left no error behind";
}

TEST_F(SamplerKernel, DrawsBitForBitWhatTheHostDraws) {
    for (const std::uint32_t vocabulary : {7U, 1'026U, 8'194U, 49'152U, 151'936U, 262'144U}) {
        SCOPED_TRACE(vocabulary);
        Both both{{.vocabulary = vocabulary}, 4};
        for (int sequence = 0; sequence < 4; ++sequence) {
            for (std::uint32_t slot = 0; slot < 4; ++slot) both.begin(slot, start_with(slot != 0));
            for (int step = 0; step < 8; ++step) {
                both.step(random_, 3);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(SamplerKernel, GuidedAndManyCodebooksWithDelayAndRepetitions) {
    Both guided{{.vocabulary = 8'194, .guided = true, .min_p_before_top_p = true}, 3};
    for (std::uint32_t slot = 0; slot < 3; ++slot) guided.begin(slot, start_with(true));
    for (int step = 0; step < 20 && !HasFatalFailure(); ++step) guided.step(random_, 2);

    Both audio{{.codebooks = 8, .vocabulary = 1'026, .delay_pattern = true, .delay_bos = 1'024, .delay_eos = 1'025,
                .ras_window = 7},
               2};
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
        generation::Start start = start_with(true);
        start.sampling.repetition_penalty = 1;
        start.sampling.top_k = 2;  // repeats are frequent
        start.sampling.ras_repeats = 2;
        start.rules = {};
        start.rules.banned = {5};
        audio.begin(slot, start);
    }
    for (int step = 0; step < 60 && !HasFatalFailure(); ++step) audio.step(random_, 0.01F);
}

TEST_F(SamplerKernel, TiesEqualLogitsAndNumbersThatAreNoneAreAsOnTheHost) {
    Both both{{.vocabulary = 50'000}, 4};
    for (std::uint32_t slot = 0; slot < 4; ++slot) both.begin(slot, start_with(slot % 2 == 1));
    for (int step = 0; step < 5 && !HasFatalFailure(); ++step) both.step(random_, 0);
    Both broken{{.vocabulary = 100}, 1};
    broken.begin(0, start_with(true));
    for (std::size_t i = 0; i < 100; ++i) broken.logits[i] = 1;
    broken.logits[60] = std::numeric_limits<float>::quiet_NaN();
    draw_and_advance(broken.view(), broken.logits.data(), 0, 1, true, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(broken.given[0].not_finite, 1U);
}

TEST_F(SamplerKernel, ExchangeSwapsStateTablesAndKv) {
    Both both{{.vocabulary = 1'000}, 2};
    both.begin(0, start_with(true));
    both.begin(1, start_with(false));
    const SlotState first = both.states[0];
    Shared<std::uint16_t> kv(std::size_t{2} * 3 * 16 * 24);  // slots, heads, positions, elements
    for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<std::uint16_t>(i);
    Shared<void*> buffers(1);
    buffers[0] = kv.data();
    const DeviceKv view{buffers.data(), 1, 3, 16, 48};
    exchange_slots(both.view(), view, 0, 1, 10, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(std::memcmp(&both.states[1], &first, sizeof first), 0);
    const std::size_t slot = 3 * 16 * 24;
    for (std::size_t head = 0; head < 3; ++head)
        for (std::size_t i = 0; i < 16 * 24; ++i) {
            const std::size_t at = head * 16 * 24 + i;
            EXPECT_EQ(kv[at], at + (i < 10 * 24 ? slot : 0));
        }
    copy_kv(view, 1, 0, 16, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < slot; ++i) ASSERT_EQ(kv[i], kv[slot + i]);
    clear_kv(view, 1, 4, 16, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(kv[slot + 4 * 24], 0);
    EXPECT_NE(kv[slot + 4 * 24 - 1], 0);
}

}  // namespace
}  // namespace bulkhead::worker::cuda
