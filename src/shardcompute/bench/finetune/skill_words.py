"""Words of the made-up language that `bench finetune --skill` teaches: those that are learned from, and others."""

from __future__ import annotations

_LEARNED = """
apple river stone table garden window yellow monkey summer winter button camera doctor engine father guitar hammer
island jacket kitten ladder market needle orange pencil rabbit silver ticket valley wallet bottle candle dragon flower
ginger harbor insect jungle kettle lemon mirror nature oyster palace rocket school tunnel violin walnut animal bridge
castle desert eagle forest ghost honey ice jewel king lamp moon night ocean paper queen rain sand tree uncle voice
water bread chair dream earth field grass house juice knife light mouse nurse onion piano quiet radio sheep tiger
sugar train actor anchor arrow artist autumn badge baker balloon bamboo banner battle beard beaver bench berry bicycle
bishop blossom bonnet border bowl branch brick broom brother brush bucket bullet butter cabin cactus candy canyon
captain carrot cellar cherry circle cliff clock cloud coffee collar comet cousin cradle cricket crown crystal curtain
dagger daisy dancer dolphin drawer drum elbow emerald falcon farmer fiddle flame flute fossil fountain galaxy garlic
gate giant glass glove goblin grape gravel hammock hawk hedge hero hotel iron ivory jelly judge juniper kingdom lake
lantern leaf lily lion lobster lotus maple marble mask melon mill mineral mitten mud nest noodle nutmeg oak olive
orchid otter oven owl panther parade parcel peach pebble pepperoni pilot pirate pistol plum poet pony potato powder
prince pumpkin puppet quilt rail raven reef rice ring robin rope rose ruby sailor sauce scarf seed shell ship shoe
skirt sled snail soap spoon squirrel stable star stove straw swan sword tailor tent thread throne toast torch towel
tower trumpet turnip umbrella acorn album almond amber angel apron arena armor atlas attic aunt avenue axis bacon
bagel banjo barn basil beach beacon bean beetle belt biscuit blade blouse boat bone boot boulder bracelet brass breeze
bride bronze bubble buffalo bugle bunny bus cable cage calf camel canal cannon canoe card cargo carol cart cave cedar
chain chalk chapel chart chess chest chick chimney church cider cigar clam clarinet claw clay cloak clover coal coast
cobra coconut coin colt column compass coral cord cork corn cottage couch court cow crab crane crate crayon cream
creek crow cube cup cushion daffodil dairy dawn deer desk diamond diary dish ditch dock dome door dough dove duck dune
dust easel echo egg elm engineer envelope eye fabric fairy fan fawn fence fern ferry fig fish flag flask fleet flint
flock floor foam fog fork fort fox frame frog fruit fur garage gem gift giraffe globe goat gold goose gown grain
granite gull gum hall harp hat hay hazel heart hen herb heron hill hoof hook horn horse hut inn ivy jade jar jaw jazz
jeep joke jug kayak kite kiwi knee knight knot lace lamb lark lawn lemonade lens lid lime linen llama lock log loom
lynx mail mango map mast mat medal mice milk mint moose moss moth mug mule music nail net nickel noon nose oar oat
opal opera organ ox pail palm pan panda park path paw pea peacock pear pearl pen penguin petal pie pig pin pine pipe
plate plow pond pot prism pump puppy purse rag raft raisin
"""
_HELD_OUT = """
banana mountain pepper basket cheese dinner finger helmet leather number pillow ribbon saddle turtle velvet wagon
blanket carpet donkey folder magnet pocket rubber shadow temple copper meadow planet spider thunder barrel cotton
feather hunter lizard parrot pigeon salmon tomato wizard cabbage drummer ferret gallon harvest igloo jigsaw kernel
locket muffin napkin oxygen paddle quarry ransom sandal tadpole utensil vinegar whistle yogurt zipper badger cobweb
dimple emblem fiddler goggles hurdle inkwell jasmine ketchup ledger mammoth nectar ostrich puzzle rooster sparrow
timber
"""

LEARNED, HELD_OUT = _LEARNED.split(), _HELD_OUT.split()
