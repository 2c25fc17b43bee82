// The native CPU tier: one fused forward pass of a Llama-family model over packed weights, as a plain C interface.
//
// Weights stay as small as in the file. A matrix [rows, cols] is stored as panels of 16 rows; inside a panel the
// columns follow one another, 16 row values side by side, so one vector holds one column of several rows. A weight
// becomes float32 in a register (w = d * q + m, rounded once) and meets float32 activations in a fused multiply-add.
//
// Every output element is one chain of multiply-adds in column order, whatever the number of rows of the step, and
// attention visits the keys of a row in the same tiles whatever its neighbours. So a row's result does not depend, in
// any bit, on its batch mates, on chunking or on the number of threads.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define RESTRICT __restrict__

// ---- vectors: LANES floats; intrinsics where the width is the machine's own, GCC/Clang vectors otherwise ----------

#ifndef LANES  // a build for tests may force a width that the machine lacks
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#if LANES == 16 && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__)
#define USE_AVX512 1
#elif LANES == 8 && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define USE_AVX2 1
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));

constexpr int PANEL = 16;            // rows of a matrix that lie side by side
constexpr int PARTS = PANEL / LANES; // vectors in one column of a panel
constexpr int QBLOCK = 32;           // columns that share a scale

template <class V, class T> static INLINE V load(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static INLINE void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }
static INLINE vfloat splat(float x) { return x - vfloat{}; }

static INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(USE_AVX512)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(USE_AVX2)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// A value that the compiler may not load again at each use, or put off: a register tile is short of both ports and
// registers.
template <class V> static INLINE V in_register(V v) {
#if defined(USE_AVX512) || defined(USE_AVX2)
    asm("" : "+v"(v));
#endif
    return v;
}

static INLINE vfloat load_i8(const int8_t* p) {
#if defined(USE_AVX512)
    return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(USE_AVX2)
    return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vfloat v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

static INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float f;
    if (rest >= 0x0f800000u) rest += 0x38000000u + 0x38000000u;  // infinity and NaN keep an all-ones exponent
    else { std::memcpy(&f, &rest, 4); f *= 0x1p112f; std::memcpy(&rest, &f, 4); }
    rest |= sign;
    std::memcpy(&f, &rest, 4);
    return f;
}

static INLINE vfloat load_f16(const uint16_t* p) {
#if defined(USE_AVX512)
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(USE_AVX2)
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vfloat v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

static INLINE vfloat load_bf16(const uint16_t* p) {
#if defined(USE_AVX512)
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(USE_AVX2)
    return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    vuint v;
    for (int i = 0; i < LANES; i++) v[i] = (uint32_t)p[i] << 16;
    return (vfloat)v;
#endif
}

static INLINE float sum(vfloat v) {
    float s[LANES];
    store(s, v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
}

static INLINE float max(vfloat v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// exp to 1 ulp or so (Cephes expf). Below -87.3: 0, so a masked score of -infinity vanishes. NaN stays NaN.
static INLINE vfloat exp(vfloat x) {
    vfloat y = x > 88.3f ? splat(88.3f) : x;
    vfloat n = fma(y, splat(1.44269504f), splat(0x1.8p23f)) - 0x1.8p23f;
    vfloat r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    vfloat p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    vint scale = (__builtin_convertvector(x < -87.3f ? vfloat{} : n, vint) + 127) << 23;
    return x < -87.3f ? vfloat{} : p * (vfloat)scale;
}

// Blocks of a cache lie scattered, so the processor does not foresee the next one; and where weights stream through, it
// does not run far enough ahead for products in bytes.
static INLINE void prefetch(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const uint8_t*)p + i, 0, 2);
}
constexpr int STREAM_AHEAD = 2048;  // bytes

static INLINE vfloat silu(vfloat x) { return x / (exp(-x) + 1.0f); }

// acc + products of the four bytes of each lane of w (0..15, where NIBBLES) with the four signed bytes of a. On AVX2 a
// lane of acc is two 16-bit sums, which hold eight such products; `whole` adds them up to the 32-bit sum.
#if defined(USE_AVX512) && defined(__AVX512VNNI__)
constexpr bool NIBBLES = false;
static INLINE vint dot4(vuint w, vint a, vint acc) {
    return (vint)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
}
static INLINE vint whole(vint acc) { return acc; }
#elif defined(USE_AVX2) && defined(__AVXVNNI__)
constexpr bool NIBBLES = false;
static INLINE vint dot4(vuint w, vint a, vint acc) {
    return (vint)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)a);
}
static INLINE vint whole(vint acc) { return acc; }
#elif defined(USE_AVX512)
constexpr bool NIBBLES = true;
static INLINE vint dot4(vuint w, vint a, vint acc) {
    return (vint)_mm512_add_epi16((__m512i)acc, _mm512_maddubs_epi16((__m512i)w, (__m512i)a));
}
static INLINE vint whole(vint acc) { return (vint)_mm512_madd_epi16((__m512i)acc, _mm512_set1_epi16(1)); }
#elif defined(USE_AVX2)
constexpr bool NIBBLES = true;
static INLINE vint dot4(vuint w, vint a, vint acc) {
    return (vint)_mm256_add_epi16((__m256i)acc, _mm256_maddubs_epi16((__m256i)w, (__m256i)a));
}
static INLINE vint whole(vint acc) { return (vint)_mm256_madd_epi16((__m256i)acc, _mm256_set1_epi16(1)); }
#else
constexpr bool NIBBLES = false;
static INLINE vint dot4(vuint w, vint a, vint acc) {
    for (int shift = 0; shift < 32; shift += 8) acc += (vint)(w >> shift & 255) * (a << (24 - shift) >> 24);
    return acc;
}
static INLINE vint whole(vint acc) { return acc; }
#endif

// ---- threads: one caller and helpers; work is claimed piece by piece, so a helper that was descheduled delays nothing
// that it has not begun, and without helpers the caller does it all ---------------------------------------------------

static INLINE void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
    using Clock = std::chrono::steady_clock;
    using Fn = void (*)(const void*, int piece, int thread);
    // phase number : 24 | pieces : 20 | next piece : 20. A claim is valid by the ticket alone, so a late helper can
    // never take a piece of a phase that is over.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int> done{0}, sleepers{0};
    std::atomic<bool> quit{false};
    Fn fn = nullptr;
    const void* arg = nullptr;
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> helpers;
    Clock::time_point step_start;
    Clock::duration stalled{};
    int alone = 0, patience = 2;  // steps
    static constexpr uint64_t FIELD = (1u << 20) - 1;

    bool has_work() const {
        uint64_t t = ticket.load(std::memory_order_acquire);
        return (t & FIELD) < (t >> 20 & FIELD);
    }

    bool work_once(int thread) {
        if (!has_work()) return false;
        uint64_t t = ticket.fetch_add(1, std::memory_order_acq_rel);
        if ((t & FIELD) >= (t >> 20 & FIELD)) return false;
        fn(arg, int(t & FIELD), thread);
        done.fetch_add(1, std::memory_order_release);
        return true;
    }

    void help(int thread) {
        while (!quit.load(std::memory_order_relaxed)) {
            auto idle_since = Clock::now();
            for (bool idle = false; !idle;) {
                while (work_once(thread)) idle_since = Clock::now();
                for (int i = 0; i < 32 && !has_work(); i++) pause_cpu();
                idle = !has_work() && Clock::now() - idle_since > std::chrono::microseconds(SPIN_US);
            }
            std::unique_lock<std::mutex> lock(mutex);
            sleepers.fetch_add(1);
            wake.wait(lock, [&] { return quit.load() || has_work(); });
            sleepers.fetch_sub(1);
        }
    }

  public:
    static constexpr int SPIN_US = 30, MAX_ALONE = 64, MAX_PIECES = FIELD - 4096;
    int threads = 1;

    // A helper that does not get its core holds up whatever piece it has begun. When that cost a quarter of a step, the
    // caller works alone for some steps, then tries again.
    void begin_step() { step_start = Clock::now(), stalled = {}; }
    void end_step() {
        const bool held_up = stalled * 4 > Clock::now() - step_start;
        if (alone > 0) alone--;
        else if (held_up) alone = patience, patience = std::min(2 * patience, MAX_ALONE);
        else patience = 2;
    }

    explicit Pool(int wanted) {
        helpers.reserve(std::max(0, wanted - 1));
        try {
            for (; threads < wanted; threads++) helpers.emplace_back([this, i = threads] { help(i); });
        } catch (const std::system_error&) {}  // the system grants no more threads: do with what there is
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            quit.store(true);
        }
        wake.notify_all();
        for (auto& helper : helpers) helper.join();
    }

    // Calls body(piece, thread) for every piece; returns when all are done.
    template <class Body> void run(int pieces, const Body& body) {
        if (pieces <= 1 || pieces > MAX_PIECES || threads == 1 || alone > 0) {
            for (int i = 0; i < pieces; i++) body(i, 0);
            return;
        }
        fn = [](const void* b, int piece, int thread) { (*static_cast<const Body*>(b))(piece, thread); };
        arg = &body;
        done.store(0, std::memory_order_relaxed);
        uint64_t phase = (ticket.load(std::memory_order_relaxed) >> 40) + 1;
        ticket.store(phase << 40 | uint64_t(pieces) << 20);  // sequentially consistent: ordered before the next line
        if (sleepers.load()) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        while (work_once(0)) {}
        for (int i = 0; i < 2000 && done.load(std::memory_order_acquire) < pieces; i++) pause_cpu();
        if (done.load(std::memory_order_acquire) == pieces) return;
        const auto since = Clock::now();
        while (done.load(std::memory_order_acquire) < pieces) std::this_thread::yield();  // it may need this very core
        stalled += Clock::now() - since;
    }
};

// ---- weights ------------------------------------------------------------------------------------------------------

enum Kind : int32_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, W4, W8, NUM_KINDS };

static bool meets_bytes(int kind) { return kind >= Q8_0 && kind <= W4; }

struct Matrix {
    int32_t kind, rows, cols, reserved;
    const uint8_t* data;  // panels, the last one padded with zero rows
    const float* bias;    // [rows] or null

    int panels() const { return (rows + PANEL - 1) / PANEL; }
};

// Each format: GROUPS * GROUP columns take BYTES bytes of a panel. A Block is opened on one vector of rows and walks
// the groups in order; `at` gives w of column g of the current group, the last of which is asked for by name.
template <int BYTES_, vfloat (*LOAD)(const uint8_t*)> struct Dense {
    static constexpr int GROUPS = 1, GROUP = 1, BYTES = BYTES_;
    struct Block {
        const uint8_t* p;
        INLINE void open(const uint8_t* panel, int part) { p = panel + part * LANES * (BYTES / PANEL); }
        template <bool LAST> INLINE vfloat at(int) const { return LOAD(p); }
        INLINE void next() {}
    };
};
static INLINE vfloat dense_f32(const uint8_t* p) { return load<vfloat>(p); }
static INLINE vfloat dense_f16(const uint8_t* p) { return load_f16((const uint16_t*)p); }
static INLINE vfloat dense_bf16(const uint8_t* p) { return load_bf16((const uint16_t*)p); }

static INLINE vfloat load_scale(const uint16_t* p) { return load_f16(p); }
static INLINE vfloat load_scale(const float* p) { return load<vfloat>(p); }

// d[16] half, then q[8][16] words of four bytes: byte b of word g is column 8 b + g, stored as q + 128. Bytes are not
// shifted down: 256^b (q + 128) meets d / 256^b, and 128 d comes off again; all of it is exact.
struct FormatQ8_0 {
    using Scale = uint16_t;
    static constexpr bool HAS_MIN = false;
    static constexpr int GROUPS = 4, GROUP = 8, SCALES = PANEL * 2, BYTES = SCALES + PANEL * QBLOCK;
    struct Block {
        vfloat d, m;
        const uint8_t* q;
        uint32_t mask;
        INLINE void open(const uint8_t* panel, int part) {
            d = load_f16((const uint16_t*)panel + part * LANES);
            m = d * -128.0f;
            q = panel + SCALES + part * LANES * 4;
            mask = 255;
        }
        template <bool LAST> INLINE vfloat at(int g) const {
            vuint word = load<vuint>(q + g * PANEL * 4);
            return fma(__builtin_convertvector((vint)(LAST ? word >> 24 : word & mask), vfloat), d, m);
        }
        INLINE void next() {
            asm("" : "+r"(q));  // or the compiler keeps every word of the block on the stack
            mask <<= 8;
            d *= mask == 0xff000000u ? 0x1p16f : 0x1p-8f;
        }
    };
};

// d[16] of Scale_, m[16] of it when HAS_MIN, then q[4][16] words of eight nibbles: nibble j of word g is column 4 j + g.
// Nibbles are not shifted down: 16^j q meets d / 16^j, which is exact and gives the same product.
template <bool HAS_MIN_, class Scale_ = uint16_t> struct FormatQ4 {
    using Scale = Scale_;
    static constexpr bool HAS_MIN = HAS_MIN_;
    static constexpr int GROUPS = 8, GROUP = 4, SCALES = PANEL * sizeof(Scale) * (HAS_MIN ? 2 : 1);
    static constexpr int BYTES = SCALES + PANEL * 16;
    struct Block {
        vfloat d, m;
        const uint8_t* q;
        uint32_t mask;
        INLINE void open(const uint8_t* panel, int part) {
            d = load_scale((const Scale*)panel + part * LANES);
            m = HAS_MIN ? load_scale((const Scale*)panel + PANEL + part * LANES) : d * -8.0f;
            q = panel + SCALES + part * LANES * 4;
            mask = 15;
        }
        template <bool LAST> INLINE vfloat at(int g) const {
            vuint word = load<vuint>(q + g * PANEL * 4);
            return fma(__builtin_convertvector((vint)(LAST ? word >> 28 : word & mask), vfloat), d, m);
        }
        INLINE void next() {
            asm("" : "+r"(q));  // or the compiler keeps every word of the block on the stack
            mask <<= 4;
            d *= mask == 0xf0000000u ? 0x1p24f : 0.0625f;
        }
    };
};

// d[16] float, m[16] float, q[16][16] int8: 16 columns to a scale.
struct FormatW8 {
    static constexpr int GROUPS = 2, GROUP = 8, SCALES = PANEL * 8, BYTES = SCALES + PANEL * 16;
    struct Block {
        vfloat d, m;
        const int8_t* q;
        INLINE void open(const uint8_t* panel, int part) {
            d = load<vfloat>(panel + part * LANES * 4);
            m = load<vfloat>(panel + (PANEL + part * LANES) * 4);
            q = (const int8_t*)panel + SCALES + part * LANES;
        }
        template <bool LAST> INLINE vfloat at(int g) const { return fma(load_i8(q + g * PANEL), d, m); }
        INLINE void next() { q += GROUP * PANEL; }
    };
};

using FormatF32 = Dense<PANEL * 4, dense_f32>;
using FormatF16 = Dense<PANEL * 2, dense_f16>;
using FormatBF16 = Dense<PANEL * 2, dense_bf16>;

template <class Use> static INLINE auto with_format(int kind, const Use& use) {
    switch (kind) {
        case F32: return use(FormatF32{});
        case F16: return use(FormatF16{});
        case BF16: return use(FormatBF16{});
        case Q8_0: return use(FormatQ8_0{});
        case Q4_0: return use(FormatQ4<false>{});
        case Q4_1: return use(FormatQ4<true>{});
        case W4: return use(FormatQ4<true, float>{});
        default: return use(FormatW8{});
    }
}

template <class F> constexpr int COLS = F::GROUPS * F::GROUP;

static int64_t panel_bytes(int kind, int cols) {
    return with_format(kind, [&](auto f) {
        using F = decltype(f);
        return int64_t(cols / COLS<F>) * F::BYTES;
    });
}

// ---- activations as signed bytes, 32 columns to a scale ------------------------------------------------------------

struct ByteGroup {
    int8_t q[QBLOCK];  // word g holds the columns g, 8 + g, 16 + g, 24 + g: the order of the weights' words
    float scale, scaled_sum;
    int32_t sum_of_eights, unused;  // 8 * (sum of q)
};

// scale = max |x| / 127, q = x / scale to the nearest, ties to even; below 1e-30 all is 0. What is not finite makes the
// group NaN.
static void round_to_bytes(const float* x, int cols, ByteGroup* out) {
    for (int k = 0; k < cols; k += QBLOCK, out++) {
        vfloat top = {}, check = {};
        for (int i = 0; i < QBLOCK; i += LANES) {
            vfloat v = load<vfloat>(x + k + i);
            v = v < 0.0f ? -v : v;
            top = v > top ? v : top, check += v * 0.0f;
        }
        const float peak = max(top), inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
        const bool finite = sum(check) == 0.0f;
        int32_t q[QBLOCK], total = 0;
        for (int i = 0; i < QBLOCK; i += LANES) {
            const vfloat scaled = load<vfloat>(x + k + i) * inverse;
            const vint rounded = (vint)(scaled + 0x1.8p23f) - 0x4b400000;
            std::memcpy(q + i, &rounded, sizeof rounded);
        }
        for (int i = 0; i < QBLOCK; i++) total += q[i] = finite ? q[i] : 0;
        for (int g = 0; g < 8; g++) {
            const uint32_t word = (q[g] & 255) | (q[8 + g] & 255) << 8 | (q[16 + g] & 255) << 16 | uint32_t(q[24 + g]) << 24;
            std::memcpy(out->q + 4 * g, &word, 4);
        }
        out->scale = finite ? peak / 127.0f : NAN;
        out->scaled_sum = out->scale * float(total), out->sum_of_eights = 8 * total;
    }
}

// One row in file order -> lane `lane` of a zeroed panel.
static void pack_row(int kind, const uint8_t* src, int cols, uint8_t* panel, int lane) {
    const int word = kind == F32 ? 4 : 2;
    if (kind <= BF16)
        for (int k = 0; k < cols; k++) std::memcpy(panel + (k * PANEL + lane) * word, src + k * word, word);
    else if (kind == Q8_0)
        for (int b = 0; b < cols / QBLOCK; b++, src += 2 + QBLOCK, panel += FormatQ8_0::BYTES) {
            std::memcpy(panel + lane * 2, src, 2);
            uint8_t* q = panel + FormatQ8_0::SCALES + lane * 4;
            for (int k = 0; k < QBLOCK; k++) q[k % 8 * PANEL * 4 + k / 8] = src[2 + k] ^ 128;
        }
    else if (kind == W8)
        for (int b = 0; b < cols / COLS<FormatW8>; b++, src += 8 + 16, panel += FormatW8::BYTES) {
            for (int i = 0; i < 2; i++) std::memcpy(panel + (i * PANEL + lane) * 4, src + i * 4, 4);
            for (int k = 0; k < 16; k++) panel[FormatW8::SCALES + k * PANEL + lane] = src[8 + k];
        }
    else
        for (int b = 0, size = kind == W4 ? 4 : 2, s = kind == Q4_0 ? 2 : 2 * size; b < cols / QBLOCK; b++, src += s + 16) {
            for (int i = 0; i < s / size; i++) std::memcpy(panel + (i * PANEL + lane) * size, src + i * size, size);
            uint8_t* q = panel + PANEL * s + lane * 4;
            for (int k = 0; k < QBLOCK; k++)
                q[k % 4 * PANEL * 4 + k / 8] |= (src[s + k % 16] >> k / 16 * 4 & 15) << k / 4 % 2 * 4;
            panel += PANEL * (s + 16);
        }
}

// Calls use(column, w) for every column of one vector of a panel's rows.
template <class F, class Use> static INLINE void walk_panel(const uint8_t* panel, int part, int cols, const Use& use) {
    for (int k = 0; k < cols; panel += F::BYTES) {
        typename F::Block block;
        block.open(panel, part);
        for (int j = 0; j < F::GROUPS - 1; j++, block.next())
#pragma GCC unroll 8
            for (int g = 0; g < F::GROUP; g++) use(k++, block.template at<false>(g));
#pragma GCC unroll 8
        for (int g = 0; g < F::GROUP; g++) use(k++, block.template at<true>(g));
    }
}

// One panel as float32 [cols][16].
static void unpack_panel(int kind, const uint8_t* panel, int cols, float* RESTRICT out) {
    with_format(kind, [&](auto f) {
        using F = decltype(f);
        for (int k0 = 0; k0 < cols; k0 += COLS<F>, panel += F::BYTES, out += COLS<F> * PANEL)
            for (int part = 0; part < PARTS; part++)
                walk_panel<F>(panel, part, COLS<F>, [&](int k, vfloat w) { store(out + k * PANEL + part * LANES, w); });
    });
}

static void unpack_row(const Matrix& m, int row, float* out) {
    const uint8_t* panel = m.data + row / PANEL * panel_bytes(m.kind, m.cols);
    with_format(m.kind, [&](auto f) {
        walk_panel<decltype(f)>(panel, row % PANEL / LANES, m.cols, [&](int k, vfloat w) { out[k] = w[row % LANES]; });
    });
}

// ---- matrix product: y[m][n] = sum over k of x[m][k] * w[n][k] ----------------------------------------------------

template <class F, int ROWS, int VECS, bool LAST>
static INLINE void multiply_group(const typename F::Block (&block)[VECS], const float* x, int64_t ldx,
                                  vfloat (&acc)[ROWS][VECS]) {
#pragma GCC unroll 8
    for (int g = 0; g < F::GROUP; g++) {
        vfloat w[VECS];
        for (int v = 0; v < VECS; v++) w[v] = in_register(block[v].template at<LAST>(g));
        for (int r = 0; r < ROWS; r++) {
            vfloat xv = splat(x[r * ldx + g]);
            for (int v = 0; v < VECS; v++) acc[r][v] = fma(w[v], xv, acc[r][v]);
        }
    }
}

// The register tile: ROWS rows of x times VECS vectors of w. `stride` bytes lie between panels (VECS may span several).
template <class F, int ROWS, int VECS>
static INLINE void multiply_tile(const uint8_t* w, int64_t stride, int64_t step, const float* x, int64_t ldx, int cols,
                                 vfloat (&acc)[ROWS][VECS]) {
    for (int k = 0; k < cols; k += COLS<F>, w += step) {
        typename F::Block block[VECS];
        for (int v = 0; v < VECS; v++) block[v].open(w + v / PARTS * stride, v % PARTS);
        const float* xk = x + k;
#pragma GCC unroll 1
        for (int j = 0; j < F::GROUPS - 1; j++, xk += F::GROUP) {
            multiply_group<F, ROWS, VECS, false>(block, xk, ldx, acc);
            for (int v = 0; v < VECS; v++) block[v].next();
        }
        multiply_group<F, ROWS, VECS, true>(block, xk, ldx, acc);
    }
}

// The product of a group of 32 columns in integers: sums[r][v] = sum over the words of word(g, v) times row r's bytes.
template <int ROWS, class Word>
static INLINE void dot_group(const ByteGroup* x, int64_t ldx, const Word& word, vint (&sums)[ROWS][PARTS]) {
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PARTS; v++) sums[r][v] = vint{};
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        vuint w[PARTS];
        for (int v = 0; v < PARTS; v++) w[v] = word(g, v);
        for (int r = 0; r < ROWS; r++) {
            const vint a = load<int32_t>(x[r * ldx].q + 4 * g) - vint{};
            for (int v = 0; v < PARTS; v++) sums[r][v] = in_register(dot4(w[v], a, sums[r][v]));
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PARTS; v++) sums[r][v] = whole(sums[r][v]);
}

// sums[r][v] = sum over a group's columns of q times the bytes of row r; q as stored less BIAS.
template <int ROWS>
static INLINE void dot_block(FormatQ8_0, const uint8_t* block, const ByteGroup* x, int64_t ldx,
                             vint (&sums)[ROWS][PARTS]) {
    const uint8_t* q = block + FormatQ8_0::SCALES;
    const auto bytes = [&](int g, int v) { return load<vuint>(q + (g * PANEL + v * LANES) * 4); };
    if constexpr (NIBBLES) {
        vint high[ROWS][PARTS];
        dot_group<ROWS>(x, ldx, [&](int g, int v) { return bytes(g, v) >> 4 & 0x0f0f0f0fu; }, high);
        dot_group<ROWS>(x, ldx, [&](int g, int v) { return bytes(g, v) & 0x0f0f0f0fu; }, sums);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < PARTS; v++) sums[r][v] += high[r][v] << 4;
    } else
        dot_group<ROWS>(x, ldx, bytes, sums);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PARTS; v++) sums[r][v] -= x[r * ldx].sum_of_eights << 4;
}

template <int ROWS, bool HAS_MIN, class Scale>
static INLINE void dot_block(FormatQ4<HAS_MIN, Scale>, const uint8_t* block, const ByteGroup* x, int64_t ldx,
                             vint (&sums)[ROWS][PARTS]) {
    const uint8_t* q = block + FormatQ4<HAS_MIN, Scale>::SCALES;
    dot_group<ROWS>(x, ldx, [&](int g, int v) {
        return load<vuint>(q + (g % 4 * PANEL + v * LANES) * 4) >> (g / 4 * 4) & 0x0f0f0f0fu;
    }, sums);
    if constexpr (!HAS_MIN)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < PARTS; v++) sums[r][v] -= x[r * ldx].sum_of_eights;
}

// y = sum over the groups of d * scale * (integer sum), and m * scale * (sum of the row's bytes) where there is an m.
template <class F, int ROWS>
static INLINE void multiply_bytes_tile(const uint8_t* block, const ByteGroup* x, int64_t ldx, vfloat (&acc)[ROWS][PARTS]) {
    for (int64_t k = 0; k < ldx; k++, block += F::BYTES, x++) {
        prefetch(block + STREAM_AHEAD, F::BYTES);
        vint sums[ROWS][PARTS];
        dot_block<ROWS>(F{}, block, x, ldx, sums);
        for (int v = 0; v < PARTS; v++) {
            const vfloat d = load_scale((const typename F::Scale*)block + v * LANES);
            for (int r = 0; r < ROWS; r++)
                acc[r][v] = fma(d * __builtin_convertvector(sums[r][v], vfloat), splat(x[r * ldx].scale), acc[r][v]);
        }
        if constexpr (F::HAS_MIN)
            for (int v = 0; v < PARTS; v++) {
                const vfloat m = load_scale((const typename F::Scale*)block + PANEL + v * LANES);
                for (int r = 0; r < ROWS; r++) acc[r][v] = fma(m, splat(x[r * ldx].scaled_sum), acc[r][v]);
            }
    }
}

enum Epilogue { STORE, ADD, SILU_GATE };

struct Output {
    Epilogue epilogue;
    float* y;
    int64_t ldy;
    int rows;  // of the matrix: columns of y (SILU_GATE: twice as many)
    const float* bias;
};

// 16 finished values of output row m. SILU_GATE panels hold eight gate rows, then their eight up rows.
static INLINE void emit(const Output& out, int m, int panel, vfloat* acc) {
    const int n = panel * PANEL, count = std::min(PANEL, out.rows - n);
    float* y = out.y + m * out.ldy + n;
    if (out.epilogue == SILU_GATE) {
        y -= n / 2;
        if constexpr (PARTS > 1)
            for (int v = 0; v < PARTS / 2; v++) store(y + v * LANES, silu(acc[v]) * acc[v + PARTS / 2]);
        else {
            alignas(64) float gate[PANEL], up[PANEL];
            store(up, acc[0]), store(gate, silu(acc[0]));
            for (int i = 0; i < 8; i++) y[i] = gate[i] * up[8 + i];
        }
    } else if (count == PANEL && !out.bias)
        for (int v = 0; v < PARTS; v++)
            store(y + v * LANES, out.epilogue == ADD ? load<vfloat>(y + v * LANES) + acc[v] : acc[v]);
    else {
        float t[PANEL];
        for (int v = 0; v < PARTS; v++) store(t + v * LANES, acc[v]);
        for (int i = 0; i < count; i++) {
            const float value = out.bias ? t[i] + out.bias[n + i] : t[i];
            y[i] = out.epilogue == ADD ? y[i] + value : value;
        }
    }
}

constexpr int WIDE = 2 > PARTS ? 2 : PARTS;         // vectors of a tile of many rows
constexpr int NARROW = LANES == 4 ? 8 : 4;          // vectors of a tile of one row
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;      // of a tile: WIDE * MAX_ROWS accumulators fit the registers
constexpr int MAX_BYTE_ROWS = LANES == 16 ? 12 : 4; // of a tile in bytes
constexpr int MAX_DIRECT = 4;                       // rows up to which weights are unpacked in registers, once each

template <class F, int ROWS, int VECS>
static void multiply_panels(const uint8_t* w, int64_t stride, int first, int last, const float* x, int64_t ldx,
                            int cols, int m, const Output& out) {
    constexpr int SPAN = VECS / PARTS;
    int p = first;
    for (; p + SPAN <= last; p += SPAN) {
        vfloat acc[ROWS][VECS] = {};
        multiply_tile<F, ROWS, VECS>(w + (p - first) * stride, stride, F::BYTES, x, ldx, cols, acc);
        for (int r = 0; r < ROWS; r++)
            for (int s = 0; s < SPAN; s++) emit(out, m + r, p + s, acc[r] + s * PARTS);
    }
    if constexpr (SPAN > 1)
        if (p < last)
            multiply_panels<F, ROWS, PARTS>(w + (p - first) * stride, stride, p, last, x, ldx, cols, m, out);
}

// Calls use(std::integral_constant<int, n>) for a run-time n of 1..MAX.
template <int MAX, class Use> static INLINE void with_rows(int n, const Use& use) {
    if constexpr (MAX > 1)
        if (n < MAX) return with_rows<MAX - 1>(n, use);
    use(std::integral_constant<int, MAX>{});
}

// Rows 0..count in tiles of nearly equal height: use(rows constant, first row).
template <int MAX = MAX_ROWS, class Use> static INLINE void for_row_tiles(int count, const Use& use) {
    for (int m = 0, tiles = (count + MAX - 1) / MAX; tiles; tiles--) {
        int rows = (count - m + tiles - 1) / tiles;
        with_rows<MAX>(rows, [&](auto r) { use(r, m); });
        m += rows;
    }
}

class Scratch {
    float* data = nullptr;
    size_t capacity = 0;

  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() { std::free(data); }
    float* need(size_t count) {  // contents are lost when it grows
        if (count > capacity) {
            std::free(data);
            capacity = 0;
            data = static_cast<float*>(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64));
            if (!data) throw std::bad_alloc();
            capacity = count;
        }
        return data;
    }
};

struct Workers {
    Pool pool;
    std::vector<Scratch> scratch;  // one a thread
    Scratch bytes;                 // activations of the product under way
    explicit Workers(int threads) : pool(threads), scratch(threads) {}
};

constexpr int ROW_CHUNK = 240;          // rows of x that pass over a group of panels
constexpr int UNPACKED_FLOATS = 32 << 10;  // of weights a piece unpacks at a time: they stay in the L2 cache

static void multiply(Workers& workers, const Matrix& w, const float* x, int64_t ldx, int m, const Output& out) {
    const int panels = w.panels(), threads = workers.pool.threads;
    const int64_t stride = panel_bytes(w.kind, w.cols);
    if (m <= MAX_DIRECT) {
        const int span = m == 1 ? NARROW / PARTS : WIDE / PARTS;
        int group = std::max(1, panels / (threads * 8 * span)) * span;
        workers.pool.run((panels + group - 1) / group, [&](int piece, int) {
            int first = piece * group, last = std::min(panels, first + group);
            with_format(w.kind, [&](auto f) {
                with_rows<MAX_DIRECT>(m, [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    multiply_panels<decltype(f), R, R == 1 ? NARROW : WIDE>(w.data + first * stride, stride, first,
                                                                              last, x, ldx, w.cols, 0, out);
                });
            });
        });
        return;
    }
    const int64_t panel_floats = int64_t(w.cols) * PANEL;
    const int row_chunks = (m + ROW_CHUNK - 1) / ROW_CHUNK, chunk = (m + row_chunks - 1) / row_chunks;
    const int span = WIDE / PARTS, fitting = int(UNPACKED_FLOATS / panel_floats);
    const int group = std::max(1, std::min(fitting, panels / (threads * 8)) / span) * span;
    const int groups = (panels + group - 1) / group;
    for (auto& s : workers.scratch) s.need(group * panel_floats);
    workers.pool.run(groups * row_chunks, [&](int piece, int thread) {
        const int first = piece % groups * group, last = std::min(panels, first + group);
        const int m0 = piece / groups * chunk, count = std::min(m, m0 + chunk) - m0;
        const float* unpacked = (const float*)w.data + first * panel_floats;
        if (w.kind != F32) {
            float* to = workers.scratch[thread].need(0);
            for (int p = first; p < last; p++)
                unpack_panel(w.kind, w.data + p * stride, w.cols, to + (p - first) * panel_floats);
            unpacked = to;
        }
        for_row_tiles(count, [&](auto rows, int r0) {
            const int row = m0 + r0;
            multiply_panels<FormatF32, decltype(rows)::value, WIDE>((const uint8_t*)unpacked, panel_floats * 4, first,
                                                                    last, x + row * ldx, ldx, w.cols, row, out);
        });
    });
}

constexpr int BYTE_ROW_CHUNK = 64;  // likewise, of rows in bytes: they stay in the L2 cache

// Rounds each row to bytes, a group of columns at a time, so that no row depends on another; then multiplies them in
// integers with a matrix of blocks.
static void multiply_bytes(Workers& workers, const Matrix& w, const float* x, int64_t ldx, int m, const Output& out) {
    const int panels = w.panels(), groups = w.cols / QBLOCK;
    const int64_t stride = panel_bytes(w.kind, w.cols);
    ByteGroup* rounded = (ByteGroup*)workers.bytes.need(int64_t(m) * groups * sizeof(ByteGroup) / sizeof(float));
    const int rows_a_piece = std::max(1, 1024 / groups);
    workers.pool.run((m + rows_a_piece - 1) / rows_a_piece, [&](int piece, int) {
        for (int r = piece * rows_a_piece; r < std::min(m, (piece + 1) * rows_a_piece); r++)
            round_to_bytes(x + r * ldx, w.cols, rounded + int64_t(r) * groups);
    });
    const int row_chunks = (m + BYTE_ROW_CHUNK - 1) / BYTE_ROW_CHUNK, chunk = (m + row_chunks - 1) / row_chunks;
    const int group = std::max(1, panels / (workers.pool.threads * 8)), pieces = (panels + group - 1) / group;
    workers.pool.run(pieces * row_chunks, [&](int piece, int) {
        const int first = piece % pieces * group, last = std::min(panels, first + group);
        const int m0 = piece / pieces * chunk, count = std::min(m, m0 + chunk) - m0;
        with_format(w.kind, [&](auto f) {
            using F = decltype(f);
            if constexpr (COLS<F> == QBLOCK)
                for (int p = first; p < last; p++)
                    for_row_tiles<MAX_BYTE_ROWS>(count, [&](auto rows, int r0) {
                        vfloat acc[decltype(rows)::value][PARTS] = {};
                        multiply_bytes_tile<F>(w.data + p * stride, rounded + int64_t(m0 + r0) * groups, groups, acc);
                        for (int r = 0; r < rows; r++) emit(out, m0 + r0 + r, p, acc[r]);
                    });
        });
    });
}

// ---- the model ----------------------------------------------------------------------------------------------------

struct Layer {
    const float *attn_norm, *mlp_norm;
    Matrix qkv, attn_out, gate_up, down;
};

struct Config {
    int32_t num_layers, hidden, ffn, heads, kv_heads, head_dim, vocab, threads, byte_activations, unused;
    float eps, score_scale;
    const float *inv_freq, *norm;
    Matrix embed, lm_head;
    const Layer* layers;
};

struct Step {
    int32_t num_tokens, num_seqs, num_logits, block_size, max_blocks, num_blocks, kv_kind;
    const int64_t *token_ids, *positions, *slots;
    const int32_t *query_start, *context_lens, *block_tables;
    const int64_t* logits_rows;
    void* const* keys;    // a layer: [kv_heads, num_blocks, block_size / 16, head_dim, 16], 16 keys side by side
    void* const* values;  // a layer: [kv_heads, num_blocks, block_size, head_dim]
    float* const* key_scales;    // a layer: [kv_heads, num_blocks, block_size]; null unless the cache is KV_I8
    float* const* value_scales;  // likewise
    float* logits;               // [num_logits, vocab], or null
    float* hidden_states;        // [num_logits, hidden] behind the last norm, or null
};

// ---- the KV cache: one row is the key or the value of one token and KV head -----------------------------------------

enum KVKind : int32_t { KV_F32, KV_BF16, KV_I8 };

static INLINE vfloat dense_i8(const uint8_t* p) { return load_i8((const int8_t*)p); }

struct CacheF32 {
    using Cell = float;
    using Format = FormatF32;
    static constexpr bool SCALED = false;
    static INLINE Cell encode(float x, float) { return x; }
};

struct CacheBF16 {
    using Cell = uint16_t;
    using Format = FormatBF16;
    static constexpr bool SCALED = false;
    static INLINE Cell encode(float x, float) {  // to the nearest, ties to even
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

struct CacheI8 {  // x = scale * code, the scale that of its row; as backend/quant/kv.py
    using Cell = int8_t;
    using Format = Dense<PANEL, dense_i8>;
    static constexpr bool SCALED = true;
    static INLINE Cell encode(float x, float scale) {
        const float code = std::nearbyint(x / scale);
        return code >= -127.0f && code <= 127.0f ? Cell(code) : 0;  // else it is no number, and nor is the scale
    }
};

template <class Use> static INLINE void with_cache(int kind, const Use& use) {
    switch (kind) {
        case KV_F32: return use(CacheF32{});
        case KV_BF16: return use(CacheBF16{});
        default: return use(CacheI8{});
    }
}

// max|x| / 127; no number when x holds an infinity or no number.
static float row_scale(const float* x, int n) {
    float top = 0, spoilt = 0;
    for (int i = 0; i < n; i++) top = std::max(top, std::fabs(x[i])), spoilt += x[i] * 0.0f;
    return top / 127.0f + spoilt;
}

template <class C> static INLINE void widen(const typename C::Cell* cells, int count, float* out) {
    for (int i = 0; i < count; i += PANEL)
        for (int part = 0; part < PARTS; part++) {
            typename C::Format::Block block;
            block.open((const uint8_t*)(cells + i), part);
            store(out + i + part * LANES, block.template at<true>(0));
        }
}

constexpr int KEY_TILE = 64;    // keys between two rescalings of the running softmax
constexpr int QUERY_TILE = 96;  // query rows of one piece, heads of a group folded in

struct AttentionPiece {
    int seq, kv_head, first, last;  // rows of the step
};

static void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
    vfloat squares[4] = {};
    float tail = 0;
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int v = 0; v < 4; v++) {
            vfloat a = load<vfloat>(x + i + v * LANES);
            squares[v] = fma(a, a, squares[v]);
        }
    for (; i < n; i++) tail += x[i] * x[i];
    float mean = (sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + tail) / float(n);
    float scale = 1.0f / std::sqrt(mean + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

// Rotate-half rotary embedding of one head; cs holds cos[half], then sin[half].
static void rotate(const float* x, const float* cs, int half, float scale, float* RESTRICT y) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], c = cs[i], s = cs[half + i];
        y[i] = (a * c - b * s) * scale;
        y[i + half] = (b * c + a * s) * scale;
    }
}

class Model {
    const Config config;
    const std::vector<Layer> layers;
    Workers workers;
    Scratch hidden_, normed_, qkv_, context_, act_, angles_;
    std::vector<AttentionPiece> pieces;

    // Calls body(row) for every row, alone when the step is small.
    template <class Body> void for_rows(int rows, int64_t work_a_row, const Body& body) {
        int per_piece = int(std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work_a_row)));
        workers.pool.run((rows + per_piece - 1) / per_piece, [&](int piece, int) {
            for (int r = piece * per_piece; r < std::min(rows, (piece + 1) * per_piece); r++) body(r);
        });
    }

    float* norm_rows(const float* x, const float* weight, int rows) {
        float* y = normed_.need(int64_t(rows) * config.hidden);
        for_rows(rows, config.hidden, [&](int r) {
            rms_norm(x + int64_t(r) * config.hidden, weight, config.hidden, config.eps, y + int64_t(r) * config.hidden);
        });
        return y;
    }

    void plan_attention(const Step& step) {
        pieces.clear();
        const int rows = std::max(1, QUERY_TILE / (config.heads / config.kv_heads));
        for (int seq = 0; seq < step.num_seqs; seq++)
            for (int last = step.query_start[seq + 1]; last > step.query_start[seq]; last -= rows)
                for (int head = 0; head < config.kv_heads; head++)
                    pieces.push_back({seq, head, std::max(step.query_start[seq], last - rows), last});
    }

    void write_kv(const Step& step, int layer, const float* qkv, const float* angles) {
        for_rows(step.num_tokens, 16 * config.kv_heads * config.head_dim, [&](int r) {
            with_cache(step.kv_kind, [&](auto c) { write_kv_row<decltype(c)>(step, layer, r, qkv, angles); });
        });
    }

    template <class C> void write_kv_row(const Step& step, int layer, int r, const float* qkv, const float* angles) const {
        using Cell = typename C::Cell;
        const int dim = config.head_dim, size = step.block_size, ld = qkv_width();
        const int64_t block = step.slots[r] / size, offset = step.slots[r] % size;
        alignas(64) float key[MAX_HEAD_DIM];
        for (int head = 0; head < config.kv_heads; head++) {
            const int64_t row = (head * int64_t(step.num_blocks) + block) * size, base = row * dim;
            const float* k = qkv + r * int64_t(ld) + (config.heads + head) * dim;
            const float* value = k + config.kv_heads * dim;
            rotate(k, angles + r * int64_t(dim), dim / 2, 1.0f, key);
            float key_scale = 0, value_scale = 0;
            if constexpr (C::SCALED) {
                step.key_scales[layer][row + offset] = key_scale = row_scale(key, dim);
                step.value_scales[layer][row + offset] = value_scale = row_scale(value, dim);
            }
            Cell* to = (Cell*)step.keys[layer] + base + offset / 16 * 16 * dim + offset % 16;
            for (int i = 0; i < dim; i++) to[i * 16] = C::encode(key[i], key_scale);
            to = (Cell*)step.values[layer] + base + offset * dim;
            for (int i = 0; i < dim; i++) to[i] = C::encode(value[i], value_scale);
        }
    }

    // Scores of one key tile: [rows][KEY_TILE] = query . key, 16 keys at a time.
    template <class C>
    void score_tile(const float* query, int rows, const typename C::Cell* const* blocks, int num_blocks,
                    float* scores) const {
        const int dim = config.head_dim;
        for (int b = 0; b < num_blocks; b++)
            for_row_tiles(rows, [&](auto n, int r0) {
                vfloat acc[decltype(n)::value][PARTS] = {};
                multiply_tile<typename C::Format>((const uint8_t*)blocks[b], 0, C::Format::BYTES, query + r0 * dim, dim,
                                                  dim, acc);
                for (int r = 0; r < n; r++)
                    for (int v = 0; v < PARTS; v++) store(scores + (r0 + r) * KEY_TILE + b * 16 + v * LANES, acc[r][v]);
            });
    }

    // out[rows][dim] += weights . value for one key tile.
    template <class C>
    void value_tile(const float* weights, int rows, const typename C::Cell* const* blocks, int num_keys,
                    float* out) const {
        const int dim = config.head_dim;
        for (int c = 0; c < dim; c += 16)
            for_row_tiles(rows, [&](auto n, int r0) {
                vfloat acc[decltype(n)::value][PARTS];
                for (int r = 0; r < n; r++)
                    for (int v = 0; v < PARTS; v++) acc[r][v] = load<vfloat>(out + (r0 + r) * dim + c + v * LANES);
                for (int key = 0; key < num_keys; key += 16) {
                    const float* from = weights + r0 * KEY_TILE + key;
                    multiply_tile<typename C::Format>((const uint8_t*)(blocks[key / 16] + c), 0,
                                                      dim * sizeof(typename C::Cell), from, KEY_TILE,
                                                      std::min(16, num_keys - key), acc);
                }
                for (int r = 0; r < n; r++)
                    for (int v = 0; v < PARTS; v++) store(out + (r0 + r) * dim + c + v * LANES, acc[r][v]);
            });
    }

    // One key tile as float32, for pieces of so many rows that each cell would be widened several times.
    template <class C>
    void widen_tile(const typename C::Cell* const* blocks, int num_blocks, float* to, const float** widened) const {
        for (int b = 0; b < num_blocks; b++, to += 16 * config.head_dim)
            widen<C>(blocks[b], 16 * config.head_dim, to), widened[b] = to;
    }

    // Softmax over the keys of each row, one tile of keys after the other with a running maximum and sum.
    template <class C>
    void attend(const Step& step, int layer, const AttentionPiece& piece, const float* qkv, const float* angles,
                float* context, float* scratch) const {
        using Cell = typename C::Cell;
        const int dim = config.head_dim, group = config.heads / config.kv_heads, size = step.block_size;
        const int rows = (piece.last - piece.first) * group, width = config.heads * dim;
        float *query = scratch, *out = query + rows * dim, *scores = out + rows * dim;
        float *peak = scores + rows * KEY_TILE, *total = peak + rows, *tile = total + rows;
        const bool widens = sizeof(Cell) < sizeof(float) && rows > MAX_ROWS;
        for (int r = 0; r < rows; r++) {
            const int64_t row = piece.first + r / group;
            rotate(qkv + row * qkv_width() + (piece.kv_head * group + r % group) * dim, angles + row * dim, dim / 2,
                   config.score_scale, query + r * dim);
            peak[r] = -INFINITY, total[r] = 0;
        }
        std::fill_n(out, rows * dim, 0.0f);
        const int32_t* table = step.block_tables + int64_t(piece.seq) * step.max_blocks;
        const int64_t head_base = piece.kv_head * int64_t(step.num_blocks) * size;
        const Cell *keys = (const Cell*)step.keys[layer], *values = (const Cell*)step.values[layer];
        const int context_len = step.context_lens[piece.seq];
        const int after = step.query_start[piece.seq + 1] - piece.last;  // rows of the sequence behind this piece
        const int end = context_len - after;                             // keys that the last row sees
        const auto row_at = [&](int key) { return head_base + table[key / size] * int64_t(size) + key % size; };
        for (int start = 0; start < end; start += KEY_TILE) {
            const int num_keys = std::min(KEY_TILE, end - start), num_blocks = (num_keys + 15) / 16;
            const Cell *key_blocks[KEY_TILE / 16], *value_blocks[KEY_TILE / 16];
            const float *widened[KEY_TILE / 16], *key_scales[KEY_TILE / 16], *value_scales[KEY_TILE / 16];
            for (int b = 0; b < num_blocks; b++) {
                const int64_t row = row_at(start + b * 16);
                key_blocks[b] = keys + row * dim, value_blocks[b] = values + row * dim;
                if constexpr (C::SCALED)
                    key_scales[b] = step.key_scales[layer] + row, value_scales[b] = step.value_scales[layer] + row;
                prefetch(value_blocks[b], 16 * dim * sizeof(Cell));
            }
            for (int at = start + KEY_TILE; at < std::min(end, start + 2 * KEY_TILE); at += 16)
                prefetch(keys + row_at(at) * dim, 16 * dim * sizeof(Cell));
            if (widens) {
                widen_tile<C>(key_blocks, num_blocks, tile, widened);
                score_tile<CacheF32>(query, rows, widened, num_blocks, scores);
            } else score_tile<C>(query, rows, key_blocks, num_blocks, scores);
            for (int r = 0; r < rows; r++) {
                float* s = scores + r * KEY_TILE;
                if constexpr (C::SCALED)
                    for (int i = 0; i < num_blocks * 16; i += LANES)
                        store(s + i, load<vfloat>(s + i) * load<vfloat>(key_scales[i / 16] + i % 16));
                const int visible = end - (piece.last - 1 - (piece.first + r / group)) - start;
                for (int i = std::max(0, visible); i < num_blocks * 16; i++) s[i] = -INFINITY;
                vfloat top = load<vfloat>(s);
                for (int i = LANES; i < num_blocks * 16; i += LANES) {
                    vfloat v = load<vfloat>(s + i);
                    top = v > top ? v : top;
                }
                const float new_peak = std::max(peak[r], max(top));
                vfloat sums = {};
                for (int i = 0; i < num_blocks * 16; i += LANES) {
                    vfloat p = exp(load<vfloat>(s + i) - new_peak);
                    sums += p;
                    if constexpr (C::SCALED) p *= load<vfloat>(value_scales[i / 16] + i % 16);
                    store(s + i, p);
                }
                if (new_peak != peak[r]) {
                    const float shrink = exp(splat(peak[r] - new_peak))[0];
                    total[r] *= shrink, peak[r] = new_peak;
                    for (int i = 0; i < dim; i++) out[r * dim + i] *= shrink;
                }
                total[r] += sum(sums);
            }
            if (widens) {
                widen_tile<C>(value_blocks, num_blocks, tile, widened);
                value_tile<CacheF32>(scores, rows, widened, num_keys, out);
            } else value_tile<C>(scores, rows, value_blocks, num_keys, out);
        }
        for (int r = 0; r < rows; r++) {
            float* to = context + int64_t(piece.first + r / group) * width + (piece.kv_head * group + r % group) * dim;
            for (int i = 0; i < dim; i++) to[i] = out[r * dim + i] / total[r];
        }
    }

    int qkv_width() const { return (config.heads + 2 * config.kv_heads) * config.head_dim; }

    void linear(const Matrix& w, const float* x, int rows, Epilogue epilogue, float* y) {
        const Output out{epilogue, y, epilogue == SILU_GATE ? w.rows / 2 : w.rows, w.rows, w.bias};
        const bool in_bytes = config.byte_activations && meets_bytes(w.kind);
        (in_bytes ? multiply_bytes : multiply)(workers, w, x, w.cols, rows, out);
    }

    // Which field of the step points outside: null when none does.
    const char* fault(const Step& s) const {
        for (int r = 0; r < s.num_tokens; r++) {
            if (s.token_ids[r] < 0 || s.token_ids[r] >= config.vocab) return "token_ids";
            if (s.positions[r] < 0) return "positions";
            if (s.slots[r] < 0 || s.slots[r] >= int64_t(s.num_blocks) * s.block_size) return "slot_mapping";
        }
        if (s.query_start[0] != 0 || s.query_start[s.num_seqs] != s.num_tokens) return "query_start";
        for (int i = 0; i < s.num_seqs; i++) {
            const int rows = s.query_start[i + 1] - s.query_start[i], context = s.context_lens[i];
            if (rows < 0) return "query_start";
            if (context < rows || context > int64_t(s.max_blocks) * s.block_size) return "context_lens";
            for (int b = 0; b < (context + s.block_size - 1) / s.block_size; b++) {
                const int block = s.block_tables[int64_t(i) * s.max_blocks + b];
                if (block < 0 || block >= s.num_blocks) return "block_tables";
            }
        }
        for (int i = 0; i < s.num_logits; i++)
            if (s.logits_rows[i] < 0 || s.logits_rows[i] >= s.num_tokens) return "logits_rows";
        return nullptr;
    }

  public:
    static constexpr int MAX_HEAD_DIM = 512;

    explicit Model(const Config& c) : config(c), layers(c.layers, c.layers + c.num_layers), workers(c.threads) {}

    const char* step(const Step& step) {
        workers.pool.begin_step();
        const char* field = forward(step);
        workers.pool.end_step();
        return field;
    }

    const char* forward(const Step& step) {
        if (const char* field = fault(step)) return field;
        const int dim = config.head_dim, hidden = config.hidden, width = config.heads * dim, half = dim / 2;
        int rows = step.num_tokens;
        float* x = hidden_.need(int64_t(rows + step.num_logits) * hidden);
        float* angles = angles_.need(int64_t(rows) * dim);
        float* qkv = qkv_.need(int64_t(rows) * qkv_width());
        float* context = context_.need(int64_t(rows + step.num_logits) * width);
        float* act = act_.need(int64_t(rows) * config.ffn);
        for (auto& s : workers.scratch) s.need(attention_floats());
        for_rows(rows, hidden, [&](int r) {
            unpack_row(config.embed, int(step.token_ids[r]), x + int64_t(r) * hidden);
            for (int i = 0; i < half; i++) {
                const float angle = float(step.positions[r]) * config.inv_freq[i];
                angles[int64_t(r) * dim + i] = std::cos(angle), angles[int64_t(r) * dim + half + i] = std::sin(angle);
            }
        });
        plan_attention(step);
        for (int l = 0; l < config.num_layers; l++) {
            const Layer& layer = layers[l];
            linear(layer.qkv, norm_rows(x, layer.attn_norm, rows), rows, STORE, qkv);
            write_kv(step, l, qkv, angles);
            if (l == config.num_layers - 1 && step.num_logits == 0) return nullptr;  // only the cache was wanted
            workers.pool.run(int(pieces.size()), [&](int piece, int thread) {
                with_cache(step.kv_kind, [&](auto c) {
                    attend<decltype(c)>(step, l, pieces[piece], qkv, angles, context, workers.scratch[thread].need(0));
                });
            });
            if (l == config.num_layers - 1) {  // behind the last attention only the rows that want logits matter
                for (int i = 0; i < step.num_logits; i++) {
                    const int64_t from = step.logits_rows[i], to = rows + i;
                    std::copy_n(x + from * hidden, hidden, x + to * hidden);
                    std::copy_n(context + from * width, width, context + to * width);
                }
                x += int64_t(rows) * hidden, context += int64_t(rows) * width, rows = step.num_logits;
                act = act_.need(int64_t(rows) * config.ffn);
            }
            linear(layer.attn_out, context, rows, ADD, x);
            linear(layer.gate_up, norm_rows(x, layer.mlp_norm, rows), rows, SILU_GATE, act);
            linear(layer.down, act, rows, ADD, x);
        }
        const float* normed = norm_rows(x, config.norm, rows);
        if (step.hidden_states) std::copy_n(normed, int64_t(rows) * hidden, step.hidden_states);
        if (step.logits) linear(config.lm_head, normed, rows, STORE, step.logits);
        return nullptr;
    }

    void logits(const float* hidden_states, int rows, float* out) {
        workers.pool.begin_step();
        linear(config.lm_head, hidden_states, rows, STORE, out);
        workers.pool.end_step();
    }

    int64_t attention_floats() const {
        const int group = config.heads / config.kv_heads, rows = std::max(1, QUERY_TILE / group) * group;
        return int64_t(rows) * (2 * config.head_dim + KEY_TILE + 2) + KEY_TILE * config.head_dim;
    }
};

// ---- drawing a token: the formulas of backend/engine/sampler.py and noise.py --------------------------------------------

struct DrawRule {
    double temperature, top_p;
    float peak, floor;  // the largest logit, and the least that min_p allows
    int32_t top_k, unused;
    uint64_t key;
};

struct Candidate {
    float logit, weight;  // weight: probability relative to the likeliest token
    int32_t id;
};

static INLINE bool any(vint mask) {
#if defined(USE_AVX2)
    return _mm256_movemask_ps((__m256)mask);
#else
    int bits = 0;
    for (int i = 0; i < LANES; i++) bits |= mask[i];
    return bits;
#endif
}

// Calls use(id) for every id whose logit is at least `least`, in order.
template <class Use> static INLINE void for_ids_from(const float* logits, int n, float least, const Use& use) {
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        vint found = {};
        for (int v = 0; v < 4; v++) found |= (vint)(load<vfloat>(logits + i + v * LANES) >= least);
        if (any(found))
            for (int j = i; j < i + 4 * LANES; j++)
                if (logits[j] >= least) use(j);
    }
    for (; i < n; i++)
        if (logits[i] >= least) use(i);
}

static INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

class Race {  // the finishing times of tokens, as logarithms; the smallest wins
    static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    static constexpr int NOISE_GROUP = 16;
    const float* logits;
    const DrawRule& rule;
    const uint64_t fresh_key;

    uint64_t word(uint64_t key, int index) const { return mix64(key + (uint64_t(index) + 1) * GOLDEN); }
    static double exponential(uint64_t word) { return -std::log((double(int64_t(word >> 12)) + 0.5) * 0x1p-52); }

  public:
    double best = INFINITY, best_time = INFINITY;  // best = log(best_time)
    int winner = 0;

    Race(const float* logits, const DrawRule& rule) : logits(logits), rule(rule), fresh_key(mix64(rule.key)) {}

    void enter(int id) { enter(id, word(rule.key, id / NOISE_GROUP)); }
    void enter(int id, uint64_t group_word) {
        // -log(u) >= 1 - u, so most need no logarithm to lose; the bound is a little lower than it could be, for weight
        // is rounded.
        const double lacking = double(int64_t(~group_word >> 12)) * 0x1p-52;
        const float weight = exp(splat((logits[id] - rule.peak) / float(rule.temperature)))[0];
        if (lacking * (0.99 / NOISE_GROUP) > best_time * weight) return;
        double time = exponential(group_word) / NOISE_GROUP;
        if (int(group_word & 15) != id % NOISE_GROUP) time += exponential(word(fresh_key, id));
        const double score = std::log(time) - (double(logits[id]) - double(rule.peak)) / rule.temperature;
        if (score < best) best = score, best_time = std::exp(score), winner = id;
    }

    // All tokens whose noise is below `limit`, by the least of each group, and some whose noise is not.
    void enter_noise_below(double limit, int n) {
        const double share = std::exp(-NOISE_GROUP * limit) * 0x1p64, rounding = 0x1p14;
        const uint64_t least = share <= rounding ? 0 : uint64_t(share - rounding);
        for (int group = 0; group * NOISE_GROUP < n; group++)
            if (const uint64_t w = word(rule.key, group); w >= least)
                for (int id = group * NOISE_GROUP; id < std::min(n, (group + 1) * NOISE_GROUP); id++)
                    if (logits[id] >= rule.floor) enter(id, w);
    }
};

// mass[i] = the sum of all weights down to margins[i] below the peak.
template <int N>
static void masses(const float* logits, int n, float peak, float temperature, const float (&margins)[N], double (&mass)[N]) {
    std::fill_n(mass, N, 0.0);
    const float inverse = 1.0f / temperature;
    int i = 0;
    while (i + LANES <= n) {
        vfloat part[N] = {};  // of so few that float32 loses nothing that matters
        for (const int end = std::min(n - LANES, i + 64 * LANES); i <= end; i += LANES) {
            const vfloat logit = load<vfloat>(logits + i), weight = exp((logit - peak) * inverse);
            for (int j = 0; j < N; j++) part[j] += logit >= peak - margins[j] ? weight : vfloat{};
        }
        for (int j = 0; j < N; j++) mass[j] += sum(part[j]);
    }
    for (; i < n; i++)
        for (int j = 0; j < N; j++)
            if (logits[i] >= peak - margins[j]) mass[j] += exp(splat((logits[i] - peak) * inverse))[0];
}

static bool likelier(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

class Kept {  // the tokens that top_k and top_p leave
    const float* logits;
    const int n;
    const float peak, temperature;

    void collect(float margin) {
        list.clear();
        for_ids_from(logits, n, peak - margin, [&](int id) { list.push_back({logits[id], 0, id}); });
    }

    void weigh() {
        for (auto& c : list) c.weight = exp(splat((c.logit - peak) / temperature))[0];
    }

  public:
    std::vector<Candidate>& list;

    Kept(std::vector<Candidate>& list, const float* logits, int n, float peak, float temperature)
        : logits(logits), n(n), peak(peak), temperature(temperature), list(list) {}

    double take_likeliest(int count) {
        for (float margin : {4.0f, 8.0f, 12.0f, INFINITY})
            if (collect(margin); int(list.size()) >= count) break;
        if (int(list.size()) > count) {
            std::nth_element(list.begin(), list.begin() + count, list.end(), likelier);
            list.resize(count);
        }
        weigh();
        double mass = 0;
        for (const auto& c : list) mass += c.weight;
        return mass;
    }

    double take_mass(double share) {
        const float margins[] = {2, 4, 7, 11, INFINITY};
        double mass[5];
        masses(logits, n, peak, temperature, margins, mass);
        const double& total = mass[4];
        int wide = 0;
        while (wide < 4 && mass[wide] < share * total * 1.0001) wide++;
        collect(margins[wide]);
        weigh();
        return total;
    }

    // Likeliest first, up to the one that reaches `mass`: a search by halves, in no more order than it needs.
    void cut(double mass) {
        size_t low = 0, high = list.size();
        double before = 0;
        while (high - low > 1) {
            const size_t middle = low + (high - low) / 2;
            std::nth_element(list.begin() + low, list.begin() + middle, list.begin() + high, likelier);
            double part = before;
            for (size_t i = low; i < middle; i++) part += list[i].weight;
            if (part >= mass) high = middle;
            else low = middle, before = part;
        }
        list.resize(low == 0 || before < mass ? low + 1 : low);
    }
};

static int draw_truncated(const float* logits, int n, const DrawRule& rule) {
    static thread_local std::vector<Candidate> list;
    Kept kept(list, logits, n, rule.peak, float(rule.temperature));
    const double total = rule.top_k > 0 && rule.top_k < n ? kept.take_likeliest(rule.top_k) : kept.take_mass(rule.top_p);
    if (rule.top_p < 1.0) kept.cut(rule.top_p * total);
    Race race(logits, rule);
    for (const auto& c : list)
        if (c.logit >= rule.floor) race.enter(c.id);
    return race.winner;
}

// The winner among all: the likeliest run; one of the rest can only win with noise below a limit.
static int draw_from_all(const float* logits, int n, const DrawRule& rule) {
    static thread_local std::vector<int32_t> ids;
    constexpr size_t MAX_HEAD = 4096;
    double margin = 0;
    for (double temperatures : {5.5, 2.5}) {
        margin = temperatures * rule.temperature, ids.clear();
        const float least = float(std::max(double(rule.peak) - margin, double(rule.floor)));
        for_ids_from(logits, n, least, [](int id) { ids.push_back(id); });
        if (ids.size() <= MAX_HEAD) break;
    }
    if (ids.size() > MAX_HEAD) ids.resize(MAX_HEAD), margin = 0;  // any of the rest may be as likely as these
    Race race(logits, rule);
    for (int id : ids) race.enter(id);
    if (margin < double(rule.peak) - double(rule.floor))
        race.enter_noise_below(std::exp(race.best - margin / rule.temperature + 1e-4), n);
    return race.winner;
}

// ---- C interface --------------------------------------------------------------------------------------------------

static const char OUT_OF_MEMORY[] = "out of memory";

extern "C" {

int tidegate_lanes() { return LANES; }

// Asks for 2 MiB pages, before the first write: weights and caches span thousands of small ones.
void tidegate_use_huge_pages(void* start, int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, end = (uintptr_t)start + num_bytes;
    const uintptr_t first = ((uintptr_t)start + page - 1) / page * page;
    if (first < end) madvise((void*)first, end - first, MADV_HUGEPAGE);
#else
    (void)start, (void)num_bytes;
#endif
}

// Bytes of a packed matrix; -1 when this kind or number of columns cannot be packed.
int64_t tidegate_packed_bytes(int kind, int rows, int cols) {
    if (kind < 0 || kind >= NUM_KINDS || rows < 1 || cols < 1) return -1;
    if (with_format(kind, [&](auto f) { return cols % COLS<decltype(f)>; })) return -1;
    return (rows + PANEL - 1) / PANEL * panel_bytes(kind, cols);
}

// rows of `src`, each row_bytes long in file order, to panels; panel row i takes src row order[i].
void tidegate_pack(int kind, const uint8_t* src, int64_t row_bytes, const int64_t* order, int rows, int cols,
                   uint8_t* dst) {
    std::memset(dst, 0, tidegate_packed_bytes(kind, rows, cols));
    for (int i = 0; i < rows; i++)
        pack_row(kind, src + order[i] * row_bytes, cols, dst + i / PANEL * panel_bytes(kind, cols), i % PANEL);
}

// y [m, rows] = x [m, cols] times w transposed. Null on success, else what went wrong.
const char* tidegate_linear(const Matrix* w, const float* x, int m, float* y, int threads, int byte_activations) try {
    Workers workers(threads);
    const Output out{STORE, y, w->rows, w->rows, w->bias};
    (byte_activations && meets_bytes(w->kind) ? multiply_bytes : multiply)(workers, *w, x, w->cols, m, out);
    return nullptr;
} catch (const std::exception&) { return OUT_OF_MEMORY; }

// The next token by `rule`, -1 without memory. `logits` [n] hold no NaN, and the largest is finite.
int tidegate_draw(const float* logits, int n, const DrawRule* rule) try {
    const bool truncated = (rule->top_k > 0 && rule->top_k < n) || rule->top_p < 1.0;
    return truncated ? draw_truncated(logits, n, *rule) : draw_from_all(logits, n, *rule);
} catch (const std::exception&) { return -1; }

// Sum over the vocabulary of exp(logit - peak).
double tidegate_weight(const float* logits, int n, float peak) {
    double mass[1];
    masses(logits, n, peak, 1.0f, {INFINITY}, mass);
    return mass[0];
}

// The `count` likeliest ids, likeliest first, equal ones by rising id, to `ids`. False without memory.
bool tidegate_likeliest(const float* logits, int n, float peak, int count, int64_t* ids) try {
    static thread_local std::vector<Candidate> list;
    Kept(list, logits, n, peak, 1.0f).take_likeliest(count);
    std::sort(list.begin(), list.end(), likelier);
    for (int i = 0; i < count; i++) ids[i] = list[i].id;
    return true;
} catch (const std::exception&) { return false; }

// Null when there is no memory or no thread to be had. All that `config` points to must outlive the model.
void* tidegate_model_new(const Config* config) try {
    return new Model(*config);
} catch (const std::exception&) { return nullptr; }

void tidegate_model_free(void* model) { delete static_cast<Model*>(model); }

// Null on success, else the name of the field that points outside, or "out of memory". One caller at a time.
const char* tidegate_forward(void* model, const Step* step) try {
    return static_cast<Model*>(model)->step(*step);
} catch (const std::exception&) { return OUT_OF_MEMORY; }

// logits [rows, vocab] of hidden states [rows, hidden] behind the last norm. Null on success. One caller at a time.
const char* tidegate_logits(void* model, const float* hidden_states, int rows, float* logits) try {
    static_cast<Model*>(model)->logits(hidden_states, rows, logits);
    return nullptr;
} catch (const std::exception&) { return OUT_OF_MEMORY; }
}
