// Does this compiler set up AMX tiles as it is told? GCC 12 takes _tile_loadconfig() to read 8 bytes and drops the stores
// to the rest of the structure, so that the first tile load of an optimised program is an illegal instruction.
#include <immintrin.h>

#include <cstdint>

#include <sys/syscall.h>
#include <unistd.h>

struct tile_config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t  rows[16];
};

static void init() {
    alignas(64) tile_config c = {};
    c.palette = 1;
    for (int i = 0; i < 8; ++i) {
        c.colsb[i] = 64;
        c.rows [i] = 16;
    }
    _tile_loadconfig(&c);
}

int main() {
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */)) {
        return 0; // no AMX here: ggml finds that out for itself
    }
    init();
    static int8_t zeros[1024];
    _tile_loadd(0, zeros, 64);
    _tile_release();
    return 0;
}
